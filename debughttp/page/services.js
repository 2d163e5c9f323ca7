// The list of Services that match the search.

import { byId, element, list, setAttribute, setBadge, setText, show } from "./dom.js";
import { count, counted } from "./format.js";

export const pageSize = 100;
export const mostServices = 1000;

export function showServices(answer, search, opened, open) {
  const shown = answer.services.length;
  const found = counted(answer.total, "Service");
  const rest = answer.total > shown ? `, the first ${count(shown)} shown` : "";
  setText(byId("count"), answer.total === 0 && search ? "No Service matches. Headless Services are not listed." : found + rest);
  show(byId("more"), answer.total > shown && shown < mostServices);
  list(byId("services"), answer.services, (s) => JSON.stringify([s.namespace, s.name]),
    (s) => createService(s, open), (node, s) => updateService(node, s, opened));
}

// markOpened marks the opened Service before the next response arrives.
export function markOpened(opened) {
  for (const item of byId("services").children) mark(item, opened);
}

function mark(item, opened) {
  const current = opened !== null && item.key === JSON.stringify([opened.namespace, opened.name]);
  setAttribute(item.firstElementChild, "aria-current", current ? "true" : null);
}

function createService(s, open) {
  const heading = element("span", { class: "heading" }, element("strong", {}, s.name));
  const button = element("button", { type: "button" }, heading,
    element("span", { class: "quiet" }), element("span", { class: "quiet" }));
  button.addEventListener("click", () => open({ namespace: s.namespace, name: s.name }));
  return element("li", {}, button);
}

function updateService(item, s, opened) {
  mark(item, opened);
  const [heading, place, ports] = item.firstElementChild.children;
  let usable = 0, all = 0;
  for (const p of s.servicePorts) {
    usable += p.endpointsUsable;
    all += p.endpointsAll;
  }
  setBadge(heading, `${count(usable)} of ${count(all)}`, usable === 0 ? "bad" : usable < all ? "warn" : "good");
  setAttribute(heading.lastElementChild, "aria-label", `${usable} of ${all} endpoints usable`);
  setAttribute(heading.lastElementChild, "title", `${usable} of ${all} endpoints usable`);
  const vips = new Set(s.servicePorts.flatMap((p) => [p.clusterIP ?? [], ...p.loadBalancerVIPs, ...p.externalIPs].flat()));
  setText(place, [s.namespace, ...vips].join(" · "));
  const numbers = new Set(s.servicePorts.map((p) => `${p.portName ? `${p.portName} ` : ""}${p.port}/${p.protocol}${p.nodePort ? ` node port ${p.nodePort}` : ""}`));
  setText(ports, [...numbers].join(" · "));
}
