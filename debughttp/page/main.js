// Asks the proxy every second and shows the answers, as long as somebody looks. The
// search and the opened Service are in the address of the page.

import { byId, setAttribute, setText } from "./dom.js";
import { duration } from "./format.js";
import { showStatus } from "./status.js";
import { markOpened, mostServices, pageSize, showServices } from "./services.js";
import { showGone, showOpened, showService } from "./service.js";
import { showSyncs, startChart } from "./syncs.js";
import { fillPacket, startExplain } from "./explain.js";

const pause = 1000;     // milliseconds between two looks
const patience = 10000; // milliseconds until an answer is given up
const settle = 150;     // milliseconds after the last key before a search begins

let search = "";
let opened = null; // namespace and name of the opened Service
let limit = pageSize;
let lastAnswer = null; // when the proxy answered last

// Silence says that the proxy does not answer, whatever the cause.
class Silence extends Error {}

async function ask(path, parameters) {
  let response, body;
  try {
    response = await fetch(`${path}?${new URLSearchParams(parameters)}`, { cache: "no-store", signal: AbortSignal.timeout(patience) });
    body = await response.json();
  } catch {
    throw new Silence("The proxy does not answer.");
  }
  return { status: response.status, body };
}

async function mustAsk(path, parameters) {
  const { status, body } = await ask(path, parameters);
  if (status !== 200) throw new Silence(`The proxy cannot answer: ${body?.error ?? `status ${status}`}.`);
  return body;
}

async function refreshStatus() {
  showStatus(await mustAsk("status", { limit: pageSize }), open);
}

async function refreshServices() {
  const asked = { search, limit };
  const answer = await mustAsk("services", { q: search, limit });
  if (asked.search === search && asked.limit === limit) showServices(answer, search, opened, open);
}

async function refreshService() {
  const asked = opened;
  if (asked === null) return;
  const { status, body } = await ask("service", asked);
  if (asked !== opened) return;
  if (status === 200) {
    showService(body, fillPacket);
  } else {
    showGone(status === 404 ? "Nothing of this Service is programmed: it is gone, waits for its sync, or is not proxied." : body?.error);
  }
}

async function refreshSyncs() {
  showSyncs(await mustAsk("syncs", {}));
}

// refresh tells of a silent proxy; any other error is ours and for the console.
async function refresh(...parts) {
  try {
    await Promise.all(parts.map((part) => part()));
    lastAnswer = Date.now();
    tell("live", "good");
  } catch (error) {
    if (!(error instanceof Silence)) throw error;
    const shown = lastAnswer === null ? "" : ` What is shown is from ${duration((Date.now() - lastAnswer) / 1000)} ago.`;
    tell(`${error.message}${shown} Still trying.`, "bad");
  }
}

function tell(text, tone) {
  setText(byId("connection"), text);
  setAttribute(byId("connection"), "data-tone", tone);
}

let timer = 0;
let polling = false;

// poll ends when the page is hidden; visibilitychange starts it again.
async function poll() {
  clearTimeout(timer);
  if (polling || document.hidden) return;
  polling = true;
  try {
    await refresh(refreshStatus, refreshServices, refreshService, refreshSyncs);
  } finally {
    polling = false;
    timer = setTimeout(poll, pause);
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

// readAddress takes over the search and the Service of a link, or of the way back.
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
  }, settle);
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
startExplain(ask);
readAddress();
poll();
