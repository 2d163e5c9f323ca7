// The opened Service: its frontends, endpoints, connections and rules.

import { byId, element, list, row, setAttribute, setBadge, setText, show, table } from "./dom.js";
import { forget, showChanges } from "./changes.js";
import { showTraffic } from "./traffic.js";
import { counted, decisionTone, duration, hostPort, stateTone } from "./format.js";

const frontendHeadings = ["Frontend", "Kind", "Action", "Policy", "Source", "Remarks", ""];
const endpointHeadings = ["Endpoint", "State", "Used", "Node", "Zone", "Hints"];
const endpointsShown = 200;

// showOpened changes the heading at once; the response fills in the rest.
export function showOpened(opened) {
  setText(byId("service-heading"), opened ? `${opened.namespace}/${opened.name}` : "Service");
  setNote("loading…");
  byId("ports").replaceChildren();
  forget();
  showTraffic(null);
  showRules(null);
  byId("rules").open = false;
  if (opened && !document.activeElement?.closest("input, select")) byId("service-heading").focus();
}

export function showService(service, explain) {
  setNote("");
  list(byId("ports"), service.servicePorts, (p) => JSON.stringify([p.family, p.portName, p.protocol]),
    (p) => createPort(p, explain), updatePort);
  showChanges(service);
}

// showGone shows that a Service is not programmed, or no longer.
export function showGone(text) {
  setNote(text);
  byId("ports").replaceChildren();
  showTraffic(null);
  showRules(null);
  showChanges({ servicePorts: [] });
}

function setNote(text) {
  setText(byId("service-note"), text);
  show(byId("service-note"), text !== "");
}

function createPort(p, explain) {
  const frontends = table("Frontends", frontendHeadings);
  const endpoints = table("Endpoints", endpointHeadings);
  const all = element("button", { type: "button" });
  const node = element("article", {}, element("h3"), element("p", { class: "quiet" }), element("p", { class: "error" }),
    frontends.box, endpoints.box, all);
  all.addEventListener("click", () => {
    node.showsAll = true;
    updatePort(node, node.port);
  });
  node.parts = { frontends: frontends.body, endpoints: endpoints.body, endpointBox: endpoints.box, all, explain };
  return node;
}

function updatePort(node, p) {
  node.port = p;
  const [heading, facts, error] = node.children;
  const { frontends, endpoints, endpointBox, all, explain } = node.parts;
  setText(heading, [p.family, p.portName, `${p.port}/${p.protocol}`].filter(Boolean).join(" · "));
  setText(facts, factsOf(p).join(" · "));
  setText(error, p.error ? `Sync failed, the previous rules may still apply: ${p.error}` : "");
  list(frontends, p.frontends, (f) => f.text, (f) => createFrontend(f, p, explain), updateFrontend);
  const shown = node.showsAll ? p.endpoints : p.endpoints.slice(0, endpointsShown);
  list(endpoints, shown, (e) => e.address, () => row(endpointHeadings), updateEndpoint);
  show(endpointBox, p.endpoints.length > 0);
  show(all, shown.length < p.endpoints.length);
  setText(all, `Show all ${counted(p.endpoints.length, "endpoint")}`);
}

function factsOf(p) {
  const facts = [`${p.endpointsUsable} of ${counted(p.endpointsAll, "endpoint")} usable`, `internal policy ${p.internalTrafficPolicy}`];
  if (p.externalTrafficPolicy) facts.push(`external policy ${p.externalTrafficPolicy}`);
  if (p.sessionAffinitySeconds) facts.push(`session affinity ${duration(p.sessionAffinitySeconds)}`);
  if (p.loadBalancing) facts.push(`load balancing ${p.loadBalancing}`);
  if (p.healthCheckNodePort) facts.push(`health check node port ${p.healthCheckNodePort}`);
  return facts;
}

function createFrontend(f, p, explain) {
  const node = row(frontendHeadings);
  const button = element("button", { type: "button", "aria-label": `Explain a packet to ${f.text}` }, "Explain…");
  button.addEventListener("click", () => explain(p.protocol, f.vip ? hostPort(f.vip, f.port) : `:${f.port}`));
  node.lastElementChild.append(button);
  return node;
}

const masqueradeWords = { keep: "kept", "non-pod": "kept for pods only", all: "masqueraded" };

function updateFrontend(node, f) {
  const [address, kind, action, scope, source, remarks] = node.children;
  setText(address, f.vip ? hostPort(f.vip, f.port) : `node port ${f.port}`);
  setText(kind, f.kind);
  setBadge(action, f.action, decisionTone(f.action));
  setText(scope, f.scope);
  setText(source, masqueradeWords[f.masquerade] ?? f.masquerade);
  const words = [];
  if (f.shortCircuit) words.push("pods and node: Cluster");
  if (f.restricted) words.push(f.sourceRanges.length ? `only from ${f.sourceRanges.join(", ")}` : "no source allowed");
  setText(remarks, words.join("; "));
}

function updateEndpoint(node, e) {
  const [address, state, used, where, zone, hints] = node.children;
  setText(address, e.address);
  setBadge(state, e.state, stateTone(e.state));
  setAttribute(node, "data-state", e.state);
  setText(used, e.used ? "used" : `no: ${e.excluded || "no frontend uses it"}`);
  setText(where, [e.node, e.local ? "this node" : "", e.priority ? `group ${e.priority}` : "", e.weight ? `weight ${e.weight}` : ""].filter(Boolean).join(" · "));
  setText(zone, e.zone ?? "");
  setText(hints, [...e.nodeHints, ...e.zoneHints].map((hint) => `for ${hint}`).join(", "));
}

// showRules shows what the engine programs for the Service; null hides it.
export function showRules(answer) {
  show(byId("rules"), answer !== null);
  list(byId("rule-texts"), answer?.families ?? [], (f) => f.family,
    () => element("div", {}, element("h3"), element("pre", { tabindex: 0 })), (node, f) => {
      setText(node.firstElementChild, f.family);
      setText(node.lastElementChild, f.text);
    });
}
