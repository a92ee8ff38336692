"use strict";
// The language of a page is in the fragment, #lang=zh, else that of the browser.
function chooseLanguage(view) {
  const lang = view.get("lang") ?? (navigator.language.startsWith("zh") ? "zh" : "en");
  document.getElementById(lang === "zh" ? "zh" : "en").checked = true;
}

function keepLanguage(view) {
  document.documentElement.lang = document.querySelector("[name=lang]:checked").value;
  view.set("lang", document.documentElement.lang);
  history.replaceState(null, "", "#" + view);
}

