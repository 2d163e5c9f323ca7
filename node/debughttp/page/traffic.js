// Connections and traffic of the opened Service, from the counts of the last answers.

import { byId, element, list, row, setText, show, table } from "./dom.js";
import { age, bytes, count, counted } from "./format.js";

const headings = ["Endpoint", "Connections", "New now", "Packets in / out", "Bytes in / out", "Bytes now"];

const both = (format, one, other) => (one === undefined ? "" : `${format(one)} / ${format(other)}`);

let last = null; // time and connections and bytes by key, of the last answer

// showTraffic shows the answer of counts; null hides it, because nothing is counted.
export function showTraffic(answer) {
  show(byId("traffic"), answer !== null);
  if (answer === null) {
    last = null;
    byId("counters").replaceChildren();
    return;
  }
  const now = { time: performance.now(), counts: new Map() };
  const connections = answer.servicePorts.reduce((n, p) => n + (p.connections ?? 0), 0);
  setText(byId("traffic-note"), `${connections > 0 || !answer.traffic ? counted(connections, "connection") : "Traffic"}${answer.since ? ` in ${age(answer.since, new Date().toISOString())}` : ""}${notes(answer)}`);
  list(byId("counters"), answer.servicePorts, (p) => JSON.stringify([p.family, p.portName, p.protocol]), createPort, (node, p) => updatePort(node, p, now));
  last = now;
}

// notes says why traffic is missing.
function notes(answer) {
  const problem = answer.trafficProblem ? `; no traffic: ${answer.trafficProblem}` : "";
  return problem + (answer.trafficLosses ? `; some traffic is missing: the kernel dropped notifications ${counted(answer.trafficLosses, "time")}` : "");
}

function createPort(p) {
  const { box, body } = table(`Connections of ${p.family} ${p.portName ?? ""}`, headings);
  const node = element("div", {}, element("h4"), box);
  node.body = body;
  return node;
}

function updatePort(node, p, now) {
  const key = JSON.stringify([p.family, p.portName, p.protocol]);
  setText(node.firstElementChild, [p.family, p.portName, p.protocol].filter(Boolean).join(" · "));
  const rows = [{ ...p, address: "all" }, ...p.endpoints];
  list(node.body, rows, (e) => e.address, () => row(headings), (line, e) => {
    const [address, connections, perSecond, packets, size, speed] = line.children;
    const id = `${key} ${e.address}`;
    now.counts.set(id, e);
    const was = last?.counts.get(id);
    const seconds = was ? (now.time - last.time) / 1000 : 0;
    setText(address, e.address);
    setText(connections, e.connections === undefined ? "" : count(e.connections));
    setText(perSecond, was && e.connections !== undefined ? `${count(Math.round((10 * Math.max(0, e.connections - was.connections)) / seconds) / 10)}/s` : "");
    setText(packets, both(count, e.packetsIn, e.packetsOut));
    setText(size, both(bytes, e.bytesIn, e.bytesOut));
    const more = e.bytesIn + e.bytesOut - (was?.bytesIn + was?.bytesOut); // NaN if unknown
    setText(speed, more >= 0 ? `${bytes(more / seconds)}/s` : "");
  });
}
