// Small helpers for the document. Texts go in as text, never as HTML.

function make(tag, className = "", text = "") {
  const element = document.createElement(tag);
  if (className) element.className = className;
  if (text) element.textContent = text;
  return element;
}

const tip = document.getElementById("tip");

// Shows a small table beside a point of the window; it scrolls with the page. `rows` has [name, value, whether to stress it].
function showTip(heading, kind, rows, remarks, x, y) {
  const title = make("h3", "", heading);
  title.append(make("span", "", kind));
  const list = make("dl");
  for (const [name, value, isStressed] of rows) {
    list.append(make("dt", isStressed ? "here" : "", name), make("dd", isStressed ? "here" : "", `${value}`));
  }
  tip.replaceChildren(title, list, ...remarks.map((remark) => make("p", "", remark)));
  tip.hidden = false;
  const { width, height } = tip.getBoundingClientRect();
  const left = x + 16 + width > innerWidth ? x - 16 - width : x + 16;
  const top = Math.min(y + 16, innerHeight - height - 8);
  tip.style.left = `${scrollX + Math.max(8, left)}px`;
  tip.style.top = `${scrollY + Math.max(8, top)}px`;
}

function hideTip() {
  tip.hidden = true;
}
