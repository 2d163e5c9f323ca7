// The form that explains the verdict on a packet.

import { byId, element, list, row, setBadge, setText, table } from "./dom.js";
import { curl, showCopy, spctl } from "./copy.js";
import { decisionTone, duration, stateTone } from "./format.js";

const headings = ["Endpoint", "State", "May be chosen", "Source", "Node"];

let get = null;
let requests = 0;

// startExplain calls change with the packet whenever the form asks for one. It shows the packet
// unless change returns false: then it is the same as before.
export function startExplain(getAnswer, change) {
  get = getAnswer;
  byId("packet").addEventListener("submit", (event) => {
    event.preventDefault();
    const packet = Object.fromEntries(new FormData(event.target));
    if (!change(packet)) explain(packet);
  });
}

// showPacket fills in the form, and explains the packet.
export function showPacket(packet) {
  const { elements } = byId("packet");
  for (const [name, value] of Object.entries(packet)) if (elements[name].value !== value) elements[name].value = value;
  explain(packet);
}

async function explain(packet) {
  const mine = ++requests;
  const parameters = Object.fromEntries(Object.entries(packet).filter(([, value]) => value));
  try {
    const { status, body } = await get("explain", parameters);
    if (mine !== requests) return;
    if (status !== 200) {
      showError(body.error);
      return;
    }
    showExplanation(body);
    showCopy("copy-packet", {
      curl: () => curl("explain", parameters),
      spctl: () => spctl("explain", ...spctlFlags(packet), packet.source, `${packet.destination}/${packet.protocol}`),
    });
  } catch (error) {
    if (mine === requests) showError(error.message);
  }
}

const spctlFlags = (packet) => [`--origin=${packet.origin}`, ...(packet.interface ? [`--interface=${packet.interface}`] : [])];

// fillPacket fills in the form, and focuses the next field.
export function fillPacket(protocol, destination) {
  const { elements } = byId("packet");
  elements.protocol.value = protocol;
  elements.destination.value = destination;
  const first = destination.startsWith(":") ? elements.destination : elements.source;
  byId("explain").scrollIntoView({ block: "nearest" });
  first.focus({ preventScroll: true });
  if (first === elements.destination) first.setSelectionRange(0, 0);
}

function showError(text) {
  byId("explanation").replaceChildren(element("p", { class: "error" }, text));
}

function showExplanation(e) {
  const verdict = element("p", { id: "verdict" });
  setBadge(verdict, e.verdict, decisionTone(e.verdict));
  verdict.append(element("span", { class: "quiet" }, ` ${e.packet.protocol} ${e.packet.source} → ${e.packet.destination}${outcome(e)}`));
  const reasons = element("ol", { id: "reasons" }, ...e.reasons.map((reason) => element("li", {}, reason)));
  const children = [verdict, reasons];
  if (e.endpoints.length > 0) {
    const { box, body } = table("Endpoints of the packet", headings);
    list(body, e.endpoints, (p) => p.address, () => row(headings), updateEndpoint);
    children.push(box);
  }
  children.push(element("p", { id: "copy-packet", class: "copy" }));
  byId("explanation").replaceChildren(...children);
}

function outcome(e) {
  const words = [];
  if (e.bySocket) words.push("by socket");
  if (e.masquerade) words.push("source masqueraded");
  if (e.affinitySeconds) words.push(`same endpoint for ${duration(e.affinitySeconds)}`);
  if (e.loadBalancing) words.push(`load balancing ${e.loadBalancing}`);
  if (e.scheduler) words.push(`scheduler ${e.scheduler} of IPVS`);
  return words.map((word) => ` · ${word}`).join("");
}

function updateEndpoint(node, p) {
  const [address, state, chosen, source, where] = node.children;
  setText(address, p.address);
  setBadge(state, p.state, stateTone(p.state));
  setText(chosen, p.excluded ? `no: ${p.excluded}` : "yes");
  setText(source, p.excluded ? "" : p.masquerade ? "masqueraded" : "kept");
  setText(where, [p.node, p.local ? "this node" : ""].filter(Boolean).join(" · "));
}
