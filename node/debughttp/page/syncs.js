// The chart of the last syncs: a bar for each, at its time, with its duration on a logarithmic
// scale.

import { byId, element, list, setAttribute, setText, svg } from "./dom.js";
import { clock, count, counted, duration } from "./format.js";

const laneHeight = 56;
const laneGap = 18;
const axisWidth = 58;
const axisHeight = 18;
const barWidth = 4;

const keyOf = (s) => `${s.family} ${s.started}`;

let syncs = [];
let now = 0; // by the proxy's clock
let chosen = null; // key of the sync chosen by pointer or arrow key; null means the last one

// showSyncs shows the answer at a time of the proxy's clock.
export function showSyncs(answer, at) {
  syncs = answer.syncs.toSorted((a, b) => Date.parse(a.started) - Date.parse(b.started));
  now = at;
  draw();
}

export function startChart() {
  const chart = byId("chart");
  chart.append(svg("svg", { width: "100%" }, svg("g"), svg("g"), svg("g")));
  chart.addEventListener("pointerover", (event) => choose(event.target.closest("[data-sync]")?.getAttribute("data-sync") ?? null));
  chart.addEventListener("pointerleave", () => choose(null));
  chart.addEventListener("blur", () => choose(null));
  chart.addEventListener("keydown", (event) => {
    const step = { ArrowLeft: -1, ArrowRight: 1 }[event.key];
    if (!step || syncs.length === 0) return;
    event.preventDefault();
    const at = syncs.indexOf(chosenSync());
    choose(keyOf(syncs[Math.min(syncs.length - 1, Math.max(0, at + step))]));
  });
  new ResizeObserver(draw).observe(chart);
}

function choose(key) {
  chosen = key;
  draw();
}

const chosenSync = () => syncs.find((s) => keyOf(s) === chosen) ?? syncs.at(-1);

const kindOf = (s) => (s.error ? "failed" : s.full ? "full" : "partial");

// scaleOf returns a scale from one power of ten to another.
function scaleOf(all) {
  const durations = all.map((s) => Math.max(s.durationSeconds, 1e-6));
  const least = Math.floor(Math.log10(Math.min(...durations)));
  const most = Math.max(least + 1, Math.ceil(Math.log10(Math.max(...durations))));
  return { least, most, height: (seconds) => Math.max(2, (laneHeight * (Math.log10(Math.max(seconds, 1e-6)) - least)) / (most - least)) };
}

function draw() {
  const root = byId("chart").firstElementChild;
  const families = [...new Set(syncs.map((s) => s.family))].sort();
  const height = Math.max(1, families.length) * (laneHeight + laneGap) + axisHeight;
  setAttribute(root, "height", height);
  if (syncs.length === 0) {
    for (const group of root.children) group.replaceChildren();
    byId("sync").replaceChildren(element("p", { class: "quiet" }, "No sync yet."));
    return;
  }
  const scale = scaleOf(syncs);
  const width = Math.max(200, byId("chart").clientWidth);
  const lanes = new Map(families.map((family, i) => [family, { bottom: (i + 1) * (laneHeight + laneGap) - 4, syncs: syncs.filter((s) => s.family === family) }]));
  const axis = timeAxis(width);
  drawAxes(root.children[0], lanes, scale, width);
  drawTimes(root.children[1], axis, height);
  drawBars(root.children[2], lanes, scale, axis);
  describe(chosenSync());
}

// timeAxis goes from the first sync to now, by the proxy's clock.
function timeAxis(width) {
  const left = axisWidth + 36, right = width - 8;
  const first = Date.parse(syncs[0].started);
  const last = Math.max(now, Date.parse(syncs.at(-1).started), first + 1000);
  return { left, right, first, last, at: (time) => left + ((right - left) * (Date.parse(time) - first)) / (last - first) };
}

const steps = [1, 2, 5, 10, 20, 30, 60, 120, 300, 600, 1200, 1800, 3600, 7200, 14400, 28800, 86400]; // seconds

// drawTimes labels the axis with ages at round distances from now.
function drawTimes(group, axis, height) {
  const span = (axis.last - axis.first) / 1000;
  const most = Math.max(2, Math.floor((axis.right - axis.left) / 90));
  const step = steps.find((s) => span / s <= most) ?? 86400 * Math.ceil(span / 86400 / most);
  const ticks = [];
  for (let back = 0; back <= span; back += step) ticks.push(back);
  list(group, ticks, (t) => t, () => svg("g", {}, svg("line"), svg("text")), (node, back) => {
    const [line, text] = node.children;
    const x = axis.at(new Date(axis.last - back * 1000).toISOString());
    for (const [name, value] of Object.entries({ x1: x, x2: x, y1: 0, y2: height - axisHeight + 3 })) setAttribute(line, name, value);
    setAttribute(text, "x", x);
    setAttribute(text, "y", height - 3);
    setAttribute(text, "class", back === 0 ? "tick" : "tick middle");
    setText(text, back === 0 ? "now" : `−${duration(back)}`);
  });
}

function drawAxes(group, lanes, scale, width) {
  const lines = [];
  for (const [family, lane] of lanes) {
    lines.push({ key: `${family} name`, text: family, x: 0, y: lane.bottom - laneHeight + 4 });
    const step = Math.ceil((scale.most - scale.least) / 3);
    for (let power = scale.least; power <= scale.most; power += step) {
      const y = lane.bottom - (laneHeight * (power - scale.least)) / (scale.most - scale.least);
      lines.push({ key: `${family} ${power}`, text: powerOfTen(power), x: axisWidth + 26, y });
    }
  }
  list(group, lines, (l) => l.key, () => svg("g", {}, svg("line"), svg("text")), (node, l) => {
    const [line, text] = node.children;
    const isName = l.x === 0;
    for (const [name, value] of Object.entries({ x1: isName ? 0 : axisWidth + 32, x2: isName ? 0 : width, y1: l.y, y2: l.y })) setAttribute(line, name, value);
    setAttribute(text, "x", l.x);
    setAttribute(text, "y", l.y + 3.5);
    setAttribute(text, "class", isName ? "lane" : "tick");
    setText(text, l.text);
  });
}

// powerOfTen returns the label of an axis line: 10 ms for -2.
function powerOfTen(power) {
  if (power >= 0) return `${10 ** power} s`;
  if (power >= -3) return `${10 ** (power + 3)} ms`;
  return `${10 ** (power + 6)} µs`;
}

// placed returns the places of a lane's syncs on the time axis. Those that would overlap stand
// beside each other.
function placed(all, axis) {
  const step = Math.min(barWidth + 1, (axis.right - axis.left) / all.length);
  const places = all.map((s) => axis.at(s.started));
  for (let i = places.length - 1, right = axis.right + step; i >= 0; i--) right = places[i] = Math.min(places[i], right - step);
  for (let i = 0, left = axis.left - step; i < places.length; i++) left = places[i] = Math.max(places[i], left + step);
  return all.map((s, i) => ({ s, x: places[i], width: Math.max(1, step - 1) }));
}

function drawBars(group, lanes, scale, axis) {
  const current = keyOf(chosenSync());
  const bars = [...lanes.values()].flatMap((lane) => placed(lane.syncs, axis).map((p) => ({ ...p, bottom: lane.bottom })));
  list(group, bars, (b) => keyOf(b.s), createBar, (node, { s, x, width, bottom }) => {
    const [area, bar, mark, title] = node.children;
    const high = scale.height(s.durationSeconds);
    for (const [name, value] of Object.entries({ x: x - 1, y: bottom - laneHeight - 2, width: width + 2, height: laneHeight + 4 })) setAttribute(area, name, value);
    for (const [name, value] of Object.entries({ x, y: bottom - high, width, height: high })) setAttribute(bar, name, value);
    setAttribute(bar, "data-kind", kindOf(s));
    setAttribute(mark, "x", x + width / 2);
    setAttribute(mark, "y", bottom - high - 2);
    setText(mark, { failed: "×", full: "▪" }[kindOf(s)] ?? "");
    setAttribute(node, "data-chosen", chosen !== null && keyOf(s) === current ? "true" : null);
    setText(title, [headline(s), ...s.stages.map((stage) => `${stage.name} ${duration(stage.durationSeconds)}`), s.error].filter(Boolean).join("\n"));
  });
}

function createBar({ s }) {
  return svg("g", { "data-sync": keyOf(s) }, svg("rect", { class: "area" }), svg("rect", { class: "bar", rx: 1 }), svg("text", { class: "mark" }), svg("title"));
}

const headline = (s) => `${s.family} ${s.full ? "full" : "partial"} sync${s.repair ? " (repair)" : ""}${s.error ? ", failed" : ""}, ${duration(s.durationSeconds)}`;

// describe shows the details of a sync as text.
function describe(s) {
  const box = byId("sync");
  if (!box.querySelector(".stages")) {
    box.replaceChildren(element("p", {}, element("strong"), element("span", { class: "quiet" })), element("ul", { class: "plain stages" }), element("p", { class: "error" }));
  }
  const [line, stages, error] = box.children;
  setText(line.firstElementChild, headline(s));
  const facts = [clock(s.started)];
  if (s.queuedSeconds) facts.push(`waited ${duration(s.queuedSeconds)}`);
  facts.push(counted(s.changes, "change"));
  if (s.transactions) facts.push(`${counted(s.writes, "write")} in ${counted(s.transactions, "transaction")}`);
  if (s.flowsDeleted) facts.push(`${counted(s.flowsDeleted, "stale flow")} deleted`);
  if (s.failed) facts.push(`${count(s.failed)} failed`);
  setText(line.lastElementChild, ` · ${facts.join(" · ")}`);
  list(stages, s.stages, (stage) => stage.name, () => element("li"), (node, stage) => setText(node, `${stage.name} ${duration(stage.durationSeconds)}`));
  setText(error, s.error ?? "");
}
