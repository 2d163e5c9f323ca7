// The filters of the list, with the number of Services that each leaves.

import { byId, element, list, setAttribute, setText, show } from "./dom.js";
import { count } from "./format.js";

// The filters in the order of the chips, with their texts and tones. One without Services is
// shown only if it is chosen or always.
const filters = [
  { name: "failed", text: "failed", tone: "bad", always: true },
  { name: "no-endpoints", text: "no endpoints", tone: "bad", always: true },
  { name: "dropping", text: "dropping", tone: "bad", always: true },
  { name: "lost", text: "frontend of another Service", tone: "warn" },
  { name: "ejected", text: "endpoint ejected", tone: "warn" },
  { name: "external", text: "from outside" },
  { name: "affinity", text: "session affinity" },
  { name: "balancing", text: "load balancing policy" },
];

export const knownFilters = new Set(filters.map((f) => f.name));

export function showChips(counts, chosen, toggle) {
  const shown = filters.filter((f) => f.always || counts[f.name] > 0 || chosen.has(f.name));
  list(byId("chips"), shown, (f) => f.name, (f) => createChip(f, toggle), (node, f) => {
    const button = node.firstElementChild;
    setAttribute(button, "aria-pressed", chosen.has(f.name));
    setAttribute(button, "data-tone", counts[f.name] > 0 ? f.tone ?? "quiet" : "none");
    setText(button.lastElementChild, count(counts[f.name]));
  });
}

function createChip(f, toggle) {
  const button = element("button", { type: "button", class: "chip", "data-filter": f.name }, element("span", {}, f.text), element("strong"));
  button.addEventListener("click", () => toggle(f.name));
  return element("li", {}, button);
}

// showNamespaces fills the choice of a namespace. It is hidden if there is only one.
export function showNamespaces(namespaces, chosen) {
  const select = byId("namespace");
  const named = chosen === "" || namespaces.some((n) => n.name === chosen) ? namespaces : [...namespaces, { name: chosen, services: 0 }];
  const options = [{ name: "", text: "all namespaces" }, ...named.map((n) => ({ name: n.name, text: `${n.name} (${count(n.services)})` }))];
  list(select, options, (o) => o.name, (o) => element("option", { value: o.name }), (node, o) => setText(node, o.text));
  if (select.value !== chosen) select.value = chosen;
  show(select, named.length > 1 || chosen !== "");
}
