// Elements.  Text of a job is only ever set as text: no function here takes markup.

const SVG = "http://www.w3.org/2000/svg";

function fill(element, properties, children) {
  for (const [name, value] of Object.entries(properties ?? {})) {
    if (value === null || value === undefined || value === false) continue;
    if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
    else element.setAttribute(name, value === true ? "" : value);
  }
  element.append(...children.flat(Infinity).filter((child) => child !== null && child !== undefined && child !== ""));
  return element;
}

export const el = (tag, properties, ...children) => fill(document.createElement(tag), properties, children);
export const svg = (tag, properties, ...children) => fill(document.createElementNS(SVG, tag), properties, children);

// The style of an element is set by its properties: the page's policy takes no style attribute.
export function styled(element, styles) {
  for (const [name, value] of Object.entries(styles)) element.style.setProperty(name, value);
  return element;
}

export function card(title, extra, ...children) {
  return el("section", { class: "card" }, el("header", null, el("h2", null, title), extra), children);
}

// Sets an element's content only if it has changed, so that a selection or a focus in it stays.
const shown = new WeakMap();
export function update(element, value, make) {
  const text = JSON.stringify(value);
  if (shown.get(element) === text) return;
  shown.set(element, text);
  element.replaceChildren(...[make(value)].flat(Infinity).filter(Boolean));
}

export const colour = (name) => getComputedStyle(document.documentElement).getPropertyValue(`--${name}`).trim();

const tip = document.getElementById("tip");
export function showTip(x, y, ...children) {
  tip.replaceChildren(...children.flat().filter(Boolean));
  tip.hidden = false;
  const { width, height } = tip.getBoundingClientRect();
  const left = Math.min(Math.max(8, x + 14), innerWidth - width - 8);
  const top = y + 18 + height > innerHeight ? Math.max(8, y - height - 12) : y + 18;
  styled(tip, { left: `${left}px`, top: `${top}px` });
}
export function hideTip() {
  tip.hidden = true;
}
addEventListener("keydown", (event) => event.key === "Escape" && hideTip());
addEventListener("scroll", hideTip, { capture: true, passive: true });
