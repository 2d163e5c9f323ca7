// Helpers that update only what has changed. Everything from the proxy becomes text,
// never markup.

export const byId = (id) => document.getElementById(id);

// element creates a node with attributes and children; strings become text.
export function element(tag, attributes = {}, ...children) {
  const node = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) setAttribute(node, name, value);
  node.append(...children);
  return node;
}

const svgNamespace = "http://www.w3.org/2000/svg";

export function svg(tag, attributes = {}, ...children) {
  const node = document.createElementNS(svgNamespace, tag);
  for (const [name, value] of Object.entries(attributes)) setAttribute(node, name, value);
  node.append(...children);
  return node;
}

export function setText(node, text) {
  text = String(text);
  if (node.textContent !== text) node.textContent = text;
}

// setAttribute removes the attribute if the value is null.
export function setAttribute(node, name, value) {
  if (value === null) {
    node.removeAttribute(name);
  } else if (node.getAttribute(name) !== String(value)) {
    node.setAttribute(name, value);
  }
}

export function show(node, visible) {
  if (node.hidden === visible) node.hidden = !visible;
}

// list makes parent have one child for each item, in their order. A child is kept while
// an item has its key, so that focus, scroll position and text selection stay.
export function list(parent, items, keyOf, create, update) {
  const known = new Map();
  for (const child of parent.children) known.set(child.key, child);
  const wanted = new Map(items.map((item) => [keyOf(item), item]));
  for (const [key, child] of known) if (!wanted.has(key)) child.remove();
  let next = parent.firstElementChild;
  for (const [key, item] of wanted) {
    let child = known.get(key);
    if (!child) {
      child = create(item);
      child.key = key;
    }
    if (child === next) {
      next = next.nextElementSibling;
    } else {
      parent.insertBefore(child, next);
    }
    update(child, item);
  }
}

// table creates an empty table in a box that scrolls if it is too wide.
export function table(label, headings) {
  const body = element("tbody");
  const row = element("tr", {}, ...headings.map((text) => element("th", { scope: "col" }, text)));
  const box = element("div", { class: "table" },
    element("table", { "aria-label": label }, element("thead", {}, row), body));
  return { box, body };
}

// row creates a table row. Its cells store their headings, for narrow windows.
export function row(headings) {
  return element("tr", {}, ...headings.map((heading) => element("td", { "data-heading": heading })));
}

// setBadge shows a text in the color of a tone: good, warn, bad or quiet.
export function setBadge(parent, text, tone) {
  let badge = parent.querySelector(":scope > .badge");
  if (!badge) {
    badge = element("span", { class: "badge" });
    parent.append(badge);
  }
  setText(badge, text);
  setAttribute(badge, "data-tone", tone);
}
