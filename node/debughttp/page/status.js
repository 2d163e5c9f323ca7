// The header: the health of each IP family, and conditions that need attention.

import { byId, element, list, setAttribute, setBadge, setText, show as setVisible } from "./dom.js";
import { age, count, counted } from "./format.js";

// showStatus shows the answer. show.open opens a Service, show.filter lists Services.
export function showStatus(status, show) {
  setText(byId("title"), status.title);
  const name = status.node.name || "node without a name";
  setText(byId("node"), [name, status.node.zone, ...status.node.addresses].filter(Boolean).join(" · "));
  document.title = `${status.title} · ${name}`;
  list(byId("families"), status.families, (f) => f.family, () => createFamily(show), (node, f) => updateFamily(node, f, status.now));
  list(byId("notes"), notes(status), (n) => n.key, (n) => createNote(n, show), updateNote);
}

// The counts of a family that lead to a list.
const links = [
  { filter: "failed", number: (f) => f.failedTotal, text: "failed" },
  { filter: "dropping", number: (f) => f.noLocalEndpointsInternal + f.noLocalEndpointsExternal, text: "without a local endpoint" },
];

function createFamily(show) {
  const lists = element("p", { class: "lists" }, ...links.map((l) => {
    const button = element("button", { type: "button", class: "link", "data-filter": l.filter });
    button.addEventListener("click", () => show.filter(l.filter));
    return button;
  }));
  return element("li", { class: "family" }, element("div", { class: "heading" }, element("strong")), element("p", { class: "quiet" }),
    element("p", { class: "error" }), lists);
}

function updateFamily(node, f, now) {
  const [heading, facts, error, lists] = node.children;
  setText(heading.firstElementChild, f.family);
  setBadge(heading, ...health(f));
  const words = [counted(f.servicePorts, "service port")];
  words.push(f.lastSuccess ? `last success ${age(f.lastSuccess, now)} ago` : "no success yet");
  if (f.staleSince) words.push(`not up to date for ${age(f.staleSince, now)}`);
  else if (f.pendingSince) words.push(`change pending for ${age(f.pendingSince, now)}`);
  if (f.damaged > 0) words.push(`changed by other programs ${f.damaged === 1 ? "once" : `${count(f.damaged)} times`}, ${age(f.lastDamage.time, now)} ago`);
  setText(facts, words.join(" · "));
  setText(error, f.failedTotal > 0 ? "" : f.lastError ?? "");
  links.forEach((l, i) => {
    const number = l.number(f);
    setText(lists.children[i], number > 0 ? `${counted(number, "service port")} ${l.text}` : "");
    setVisible(lists.children[i], number > 0);
  });
}

function health(f) {
  if (f.failedTotal > 0) return [`${count(f.failedTotal)} failed`, "bad"];
  if (f.lastError) return ["failing", "bad"];
  return f.synced ? ["in sync", "good"] : ["not yet programmed", "warn"];
}

const failuresShown = 20;

// notes returns failures, conditions and problems as lines of text.
function notes(status) {
  const all = [];
  if (status.waiting) all.push({ key: "waiting", tone: "warn", kind: "Waiting", text: `the first sync waits for: ${status.waiting.join(", ")}` });
  if (status.without) all.push({ key: "without", tone: "warn", kind: "Without", text: `the program did not set Deps.${status.without.join(" and Deps.")}: packets may need it` });
  for (const f of status.families) {
    for (const e of f.failed.slice(0, failuresShown)) {
      all.push({
        key: JSON.stringify(["failed", f.family, e.namespace, e.name, e.portName, e.protocol]), tone: "bad", kind: "Failed",
        text: `${e.namespace}/${e.name}${e.portName ? `:${e.portName}` : ""} (${e.protocol}, ${f.family}): ${e.error}`, service: e,
      });
    }
    if (f.failedTotal > failuresShown) {
      all.push({ key: `failed more ${f.family}`, tone: "bad", kind: "Failed", text: `${counted(f.failedTotal - failuresShown, "other service port")} (${f.family})` });
    }
  }
  for (const c of status.conditions) {
    const since = c.since ? `, for ${age(c.since, status.now)}` : "";
    all.push({ key: JSON.stringify(["condition", c.type, c.family]), tone: "warn", kind: c.type, text: `${c.message}${c.family ? ` (${c.family}${since})` : since}` });
  }
  for (const p of status.problems.slice(0, failuresShown)) {
    all.push({ key: JSON.stringify(["problem", p]), tone: "warn", kind: "Set aside", text: `${p.object}: ${p.field}${p.value ? ` “${p.value}”` : ""}: ${p.reason}` });
  }
  if (status.problemsTotal > failuresShown) {
    all.push({ key: "more", tone: "warn", kind: "Set aside", text: counted(status.problemsTotal - failuresShown, "other value") });
  }
  return all;
}

function createNote(note, show) {
  const item = element("li", { class: "note" }, element("span", { class: "badge" }));
  if (note.service) {
    const { namespace, name } = note.service;
    const button = element("button", { type: "button", class: "link" });
    button.addEventListener("click", () => show.open({ namespace, name }));
    item.append(button);
  } else {
    item.append(element("span"));
  }
  return item;
}

function updateNote(node, note) {
  setText(node.firstElementChild, note.kind);
  setAttribute(node.firstElementChild, "data-tone", note.tone);
  setText(node.lastElementChild, note.text);
}
