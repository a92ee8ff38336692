function show() {
  keepLanguage(new URLSearchParams());
}

function read() {
  chooseLanguage(new URLSearchParams(location.hash.slice(1)));
  show();
}

document.querySelectorAll("input").forEach((input) => input.addEventListener("input", show));
addEventListener("hashchange", read);
read();
