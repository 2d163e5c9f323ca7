// What has changed in the opened Service since the page shows it.

import { byId, element, list, setText } from "./dom.js";

const changesShown = 50;

let before = null; // the lines of the last answer: what each frontend does, and each endpoint is
let changes = [];  // newest first
let number = 0;

export function forget() {
  before = null;
  changes = [];
  draw();
}

export function showChanges(service) {
  const now = linesOf(service);
  if (before) {
    for (const [what, is] of now) {
      const was = before.get(what);
      if (was === undefined) add(`${what} is new: ${is}`);
      else if (was !== is) add(`${what}: ${is}, was ${was}`);
    }
    for (const [what, was] of before) if (!now.has(what)) add(`${what} is gone, was ${was}`);
  }
  before = now;
  draw();
}

function linesOf(service) {
  const lines = new Map();
  for (const p of service.servicePorts) {
    const port = [p.family, p.portName].filter(Boolean).join(" ");
    if (p.error) lines.set(`${port} sync`, `failed: ${p.error}`);
    for (const f of p.frontends) lines.set(`${port} frontend ${f.text}`, f.action);
    for (const e of p.endpoints) lines.set(`${port} endpoint ${e.address}`, e.used ? `${e.state}, used` : `${e.state}, not used${e.excluded ? ` (${e.excluded})` : ""}`);
  }
  return lines;
}

function add(text) {
  changes.unshift({ key: number++, text, time: new Date().toLocaleTimeString("en-GB") });
  changes.length = Math.min(changes.length, changesShown);
}

function draw() {
  const shown = changes.length ? changes : [{ key: "none", text: "none", time: "" }];
  list(byId("changes"), shown, (c) => c.key, () => element("li", {}, element("span", { class: "quiet" }), element("span")), (node, c) => {
    setText(node.firstElementChild, c.time);
    setText(node.lastElementChild, c.text);
  });
}
