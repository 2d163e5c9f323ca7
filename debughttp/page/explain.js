// The form that explains the verdict on a packet.

import { byId, element, list, row, setBadge, setText, table } from "./dom.js";
import { decisionTone, duration, stateTone } from "./format.js";

const headings = ["Endpoint", "State", "May be chosen", "Source", "Node"];

export function startExplain(get) {
  let requests = 0;
  byId("packet").addEventListener("submit", async (event) => {
    event.preventDefault();
    const mine = ++requests;
    const parameters = Object.fromEntries(new FormData(event.target));
    try {
      const { status, body } = await get("explain", parameters);
      if (mine === requests) status === 200 ? showExplanation(body) : showError(body.error);
    } catch (error) {
      if (mine === requests) showError(error.message);
    }
  });
}

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
  byId("explanation").replaceChildren(...children);
}

function outcome(e) {
  const words = [];
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
