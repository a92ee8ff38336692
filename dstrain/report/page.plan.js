// Shows the answer at the sliders' positions. The view is the fragment: #gpus=16&seq_len=8192&micro_batch=chosen&lang=zh
const data = JSON.parse(document.getElementById("data").textContent);
const names = ["gpus", "seq_len", "micro_batch"];  // the order of data.points
const near = document.getElementById("near");
const all = (selector) => near.querySelectorAll(selector);

function put(field, value) {
  all(`[data-text="${field}"]`).forEach((node) => { node.textContent = value; });
}

function toggle(what, is_shown) {
  all(`[data-if="${what}"]`).forEach((node) => { node.hidden = !is_shown; });
}

function fill(name, bar) {
  const node = near.querySelector(`[data-bar="${name}"]`);
  bar.parts.forEach((part, index) => {
    node.children[index].style.width = part.share + "%";
    put(`${name}.parts.${index}`, part.gib);
    all(`[data-text="${name}.parts.${index}"]`).forEach((text) => { text.parentNode.hidden = part.gib === "0.0"; });
  });
  for (const mark of ["usable", "capacity"]) {
    node.querySelector("." + mark).style.left = bar[mark].share + "%";
    put(`${name}.${mark}`, bar[mark].gib);
  }
  put(name + ".total", bar.total);
}

function show() {
  let index = 0;
  const view = new URLSearchParams();
  for (const name of names) {
    const values = data.axes[name], at = Number(document.getElementById(name).value);
    index = index * values.length + at;
    view.set(name, values[at] ?? "chosen");
  }
  const point = data.points[index];
  view.forEach((value, name) => put(name, name === "gpus" ? `${value} (${point.shape})` : value));
  toggle("problem", "problem" in point);
  toggle("answer", !("problem" in point));
  toggle("command", point.command);
  put("command", point.command);
  put("problem", point.problem);
  if (!("problem" in point)) {
    ["title", "step", "tokens", "mfu", "limit", "samples"].forEach((field) => put(field, point[field]));
    put("limit_zh", data.chinese[point.limit]);
    toggle("gpu", !point.fits_gpu);
    toggle("host", !point.fits_host);
    fill("gpu", point.gpu);
    fill("host", point.host);
  }
  keepLanguage(view);
}

function read() {
  const view = new URLSearchParams(location.hash.slice(1));
  for (const name of names) {
    const words = data.axes[name].map((value) => String(value ?? "chosen"));
    const at = words.indexOf(view.get(name));
    document.getElementById(name).value = at < 0 ? data.axes[name].indexOf(data.asked[name]) : at;
  }
  chooseLanguage(view);
  show();
}

near.hidden = false;
document.querySelectorAll("input").forEach((input) => input.addEventListener("input", show));
addEventListener("hashchange", read);
read();
