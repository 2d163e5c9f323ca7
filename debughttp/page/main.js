// Polls the proxy every second while the page is visible. The URL's fragment holds the
// search and the opened Service.

import { byId, setAttribute, setText } from "./dom.js";
import { duration } from "./format.js";
import { showStatus } from "./status.js";
import { markOpened, mostServices, pageSize, showServices } from "./services.js";
import { showGone, showOpened, showService } from "./service.js";
import { showSyncs, startChart } from "./syncs.js";
import { fillPacket, startExplain } from "./explain.js";

const pollPause = 1000;       // milliseconds
const requestTimeout = 10000; // milliseconds
const typingPause = 150;      // milliseconds after the last key before a search begins

let search = "";
let opened = null; // namespace and name of the opened Service
let limit = pageSize;
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

async function refreshStatus() {
  showStatus(await mustGet("status", { limit: pageSize }), open);
}

async function refreshServices() {
  const requested = { search, limit };
  const answer = await mustGet("services", { q: search, limit });
  if (requested.search === search && requested.limit === limit) showServices(answer, search, opened, open);
}

async function refreshService() {
  const requested = opened;
  if (requested === null) return;
  const { status, body } = await get("service", requested);
  if (requested !== opened) return;
  if (status === 200) {
    showService(body, fillPacket);
  } else {
    showGone(status === 404 ? "This Service is not programmed: it was deleted, waits for a sync, or is not proxied." : body?.error);
  }
}

async function refreshSyncs() {
  showSyncs(await mustGet("syncs", {}));
}

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
    await refresh(refreshStatus, refreshServices, refreshService, refreshSyncs);
  } finally {
    polling = false;
    timer = setTimeout(poll, pollPause);
  }
}

function address() {
  const parameters = new URLSearchParams();
  if (search) parameters.set("q", search);
  if (opened) {
    parameters.set("namespace", opened.namespace);
    parameters.set("name", opened.name);
  }
  return `#${parameters}`;
}

function open(service) {
  setOpened(service);
  history.pushState(null, "", address());
}

function setOpened(service) {
  opened = service;
  showOpened(opened);
  markOpened(opened);
  refresh(refreshService);
}

// readAddress reads the search and the opened Service from the URL.
function readAddress() {
  const parameters = new URLSearchParams(location.hash.slice(1));
  search = parameters.get("q") ?? "";
  if (byId("search").value !== search) byId("search").value = search;
  const name = parameters.get("name");
  const linked = name ? { namespace: parameters.get("namespace") ?? "", name } : null;
  if (JSON.stringify(linked) !== JSON.stringify(opened)) setOpened(linked);
  refresh(refreshServices);
}

let typing = 0;

byId("search").addEventListener("input", (event) => {
  clearTimeout(typing);
  typing = setTimeout(() => {
    search = event.target.value;
    limit = pageSize;
    history.replaceState(null, "", address());
    refresh(refreshServices);
  }, typingPause);
});

byId("more").addEventListener("click", () => {
  limit = Math.min(mostServices, limit + pageSize);
  refresh(refreshServices);
});

byId("close").addEventListener("click", () => {
  open(null);
  byId("search").focus();
});

window.addEventListener("hashchange", readAddress);
window.addEventListener("popstate", readAddress);
document.addEventListener("visibilitychange", poll);

startChart();
startExplain(get);
readAddress();
poll();
