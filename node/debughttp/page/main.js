// Polls the proxy every second while the page is visible. The URL's fragment holds what the
// page shows: the search, the opened Service and the explained packet.

import { byId, setAttribute, setText, show } from "./dom.js";
import { duration } from "./format.js";
import { showStatus } from "./status.js";
import { showChips, showNamespaces, knownFilters } from "./chips.js";
import { showCount, startList } from "./list.js";
import { showGone, showOpened, showRules, showService } from "./service.js";
import { showTraffic } from "./traffic.js";
import { showSyncs, startChart } from "./syncs.js";
import { fillPacket, showPacket, startExplain } from "./explain.js";
import { curl, showCopy, spctl } from "./copy.js";
import { startKeys } from "./keys.js";

const pollPause = 1000;       // milliseconds
const requestTimeout = 10000; // milliseconds
const typingPause = 150;      // milliseconds after the last key before a search begins
const notesShown = 100;

// view is what the URL holds.
let view = { q: "", namespace: "", filters: new Set(), opened: null, packet: null };
let lastAnswer = null; // time of the proxy's last response

// RequestError means that the proxy did not answer, or answered with an error.
class RequestError extends Error {}

async function get(path, parameters) {
  let response, body;
  try {
    response = await fetch(`${path}?${new URLSearchParams(parameters)}`, { cache: "no-store", signal: AbortSignal.timeout(requestTimeout) });
    body = await response.json();
  } catch {
    throw new RequestError("The proxy does not answer.");
  }
  return { status: response.status, body };
}

async function mustGet(path, parameters) {
  const { status, body } = await get(path, parameters);
  if (status !== 200) throw new RequestError(`The proxy returned an error: ${body?.error ?? `status ${status}`}.`);
  return body;
}

// searchParameters are those of the request for the list.
function searchParameters() {
  const parameters = {};
  if (view.q) parameters.q = view.q;
  if (view.namespace) parameters.namespace = view.namespace;
  if (view.filters.size) parameters.filter = [...view.filters].join(",");
  return parameters;
}

const services = startList({
  fetchWindow: (offset, limit) => mustGet("services", { ...searchParameters(), offset, limit }),
  href: (service) => fragment({ ...view, opened: service }),
  onOpen: open,
});

let behind = 0; // milliseconds of the proxy's clock behind that of the browser

async function refreshStatus() {
  const status = await mustGet("status", { limit: notesShown });
  behind = Date.now() - Date.parse(status.now);
  available = new Set(status.answers);
  showStatus(status, { open, filter: (name) => change({ q: "", namespace: "", filters: new Set([name]), opened: null }) });
}

async function refreshServices() {
  if (view.opened) return;
  const searched = view;
  const answer = await services.refresh();
  if (!answer || searched !== view) return;
  showCount(answer.total, Object.keys(searchParameters()).length > 0);
  showChips(answer.counts, view.filters, toggle);
}

async function refreshNamespaces() {
  if (!view.opened) showNamespaces((await mustGet("namespaces", {})).namespaces, view.namespace);
}

async function refreshService() {
  const requested = view.opened;
  if (requested === null) return;
  const { status, body } = await get("service", requested);
  if (requested !== view.opened) return;
  if (status === 200) {
    showService(body, fillPacket);
  } else {
    showGone(status === 404 ? "This Service is not programmed: it was deleted, waits for a sync, or is not proxied." : body?.error);
  }
}

// Not every version has these answers, and not every engine. What the engine of a Service lacks is not
// asked for again; that says nothing about other Services, nor does one that is not there.
const optional = { counts: showTraffic, rules: showRules };
let available = new Set();
const lacking = new Set();

async function refreshOptional(path) {
  const requested = view.opened;
  if (requested === null || !available.has(path) || lacking.has(path + JSON.stringify(requested)) || path === "rules" && !byId("rules").hidden && !byId("rules").open) return;
  const { status, body } = await get(path, requested);
  if (status === 501) lacking.add(path + JSON.stringify(requested));
  if (requested === view.opened) optional[path](status === 200 ? body : null);
}

async function refreshSyncs() {
  showSyncs(await mustGet("syncs", {}), Date.now() - behind);
}

const refreshOpened = () => refresh(refreshService, () => refreshOptional("counts"), () => refreshOptional("rules"));

// refresh shows request errors. Other errors are bugs of the page and go to the console.
async function refresh(...parts) {
  try {
    await Promise.all(parts.map((part) => part()));
    lastAnswer = Date.now();
    showConnection("live", "good");
  } catch (error) {
    if (!(error instanceof RequestError)) throw error;
    const shown = lastAnswer === null ? "" : ` The data is ${duration((Date.now() - lastAnswer) / 1000)} old.`;
    showConnection(`${error.message}${shown} Trying again.`, "bad");
  }
}

function showConnection(text, tone) {
  setText(byId("connection"), text);
  setAttribute(byId("connection"), "data-tone", tone);
}

let timer = 0;
let polling = false;

// poll stops while the page is hidden; visibilitychange starts it again.
async function poll() {
  clearTimeout(timer);
  if (polling || document.hidden) return;
  polling = true;
  try {
    await Promise.all([refresh(refreshStatus, refreshServices, refreshNamespaces, refreshSyncs), refreshOpened()]);
  } finally {
    polling = false;
    timer = setTimeout(poll, pollPause);
  }
}

// fragment is the URL of a view.
function fragment(v) {
  const parameters = new URLSearchParams();
  if (v.q) parameters.set("q", v.q);
  if (v.namespace) parameters.set("in", v.namespace);
  if (v.filters.size) parameters.set("filter", [...v.filters].join(","));
  if (v.opened) {
    parameters.set("namespace", v.opened.namespace);
    parameters.set("name", v.opened.name);
  }
  for (const [name, value] of Object.entries(v.packet ?? {})) if (value) parameters.set(name, value);
  return `#${parameters}`;
}

const packetFields = ["protocol", "origin", "source", "destination", "interface"];

// parsed is the view of a URL.
function parsed(hash) {
  const parameters = new URLSearchParams(hash.slice(1));
  const name = parameters.get("name");
  const packet = Object.fromEntries(packetFields.map((field) => [field, parameters.get(field) ?? ""]));
  return {
    q: parameters.get("q") ?? "", namespace: parameters.get("in") ?? "",
    filters: new Set((parameters.get("filter") ?? "").split(",").filter((f) => knownFilters.has(f))),
    opened: name ? { namespace: parameters.get("namespace") ?? "", name } : null,
    packet: packet.destination ? packet : null,
  };
}

// change shows another view, which the back button leaves. It returns false for the same view.
function change(parts) {
  const next = { ...view, ...parts };
  if (fragment(next) === fragment(view)) return false;
  history.pushState(null, "", fragment(next));
  go(next);
  return true;
}

function open(service) {
  change({ opened: service });
}

function toggle(filter) {
  const filters = new Set(view.filters);
  if (!filters.delete(filter)) filters.add(filter);
  change({ filters });
}

const searchOf = (v) => fragment({ ...v, opened: null, packet: null });

// go shows a view.
function go(next) {
  const before = view;
  view = next;
  if (byId("search").value !== view.q) byId("search").value = view.q;
  if (byId("namespace").value !== view.namespace) byId("namespace").value = view.namespace;
  show(byId("list"), view.opened === null);
  show(byId("service"), view.opened !== null);
  if (searchOf(before) !== searchOf(view)) services.restart();
  if (JSON.stringify(before.opened) !== JSON.stringify(view.opened)) {
    showOpened(view.opened);
    if (view.opened) showServiceCommands(view.opened);
    else services.focusActive();
  }
  if (view.packet && JSON.stringify(before.packet) !== JSON.stringify(view.packet)) showPacket(view.packet);
  showCopy("copy-list", {
    curl: () => curl("services", searchParameters()),
    spctl: () => spctl("services", ...spctlFlags(), ...(view.q ? ["--", view.q] : [])),
  });
  refresh(refreshServices, refreshNamespaces);
  refreshOpened();
}

const spctlFlags = () => [...(view.namespace ? [`--namespace=${view.namespace}`] : []), ...(view.filters.size ? [`--filter=${[...view.filters].join(",")}`] : [])];

function showServiceCommands({ namespace, name }) {
  showCopy("copy-service", { curl: () => curl("service", { namespace, name }), spctl: () => spctl("get", `${namespace}/${name}`) });
}

const readAddress = () => go(parsed(location.hash));

let typing = 0;

byId("search").addEventListener("input", (event) => {
  clearTimeout(typing);
  typing = setTimeout(() => {
    const next = { ...view, q: event.target.value, opened: null };
    if (view.opened) history.pushState(null, "", fragment(next));
    else history.replaceState(null, "", fragment(next));
    go(next);
  }, typingPause);
});

byId("namespace").addEventListener("change", (event) => change({ namespace: event.target.value, opened: null }));
byId("close").addEventListener("click", () => open(null));
window.addEventListener("hashchange", readAddress);
window.addEventListener("popstate", readAddress);
document.addEventListener("visibilitychange", poll);

startKeys({ move: (step) => { if (!view.opened) services.move(step); }, close: () => open(null) });
startChart();
startExplain(get, (packet) => change({ packet }));
readAddress();
poll();
