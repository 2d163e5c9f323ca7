// The list of Services: only the rows in sight are in the document, and only their windows
// come from the proxy.

import { byId, element, setAttribute, setBadge, setText } from "./dom.js";
import { count, counted, verdictTone } from "./format.js";

const windowSize = 100;
const spareRows = 8;          // above and below those in sight
const scrollingPause = 60;    // milliseconds after which the windows in sight are requested

// startList returns the list. fetchWindow asks for Services from an offset on; href is the URL
// of a Service.
export function startList({ fetchWindow, href, onOpen }) {
  const box = byId("rows");
  const spacer = element("div", { class: "spacer", role: "presentation" });
  box.append(spacer);
  let windows = new Map(); // by number, the Services
  let total = 0;
  let generation = 0;      // of the search: answers to an older one are dropped
  let active = -1;
  let focusWhenDrawn = false;
  let timer = 0;

  const rowHeight = () => parseFloat(getComputedStyle(box).getPropertyValue("--row"));
  const serviceAt = (i) => windows.get(Math.floor(i / windowSize))?.[i % windowSize];
  function inSight() {
    const from = Math.floor(box.scrollTop / rowHeight());
    const rows = Math.ceil(box.clientHeight / rowHeight());
    return { from: Math.max(0, from - spareRows), to: Math.min(total, from + rows + 1 + spareRows) };
  }

  function draw() {
    spacer.style.height = `${total * rowHeight()}px`;
    const { from, to } = inSight();
    const known = new Map();
    for (const row of [...box.children].slice(1)) {
      if (row.index < from || row.index >= to) row.remove();
      else known.set(row.index, row);
    }
    for (let i = from; i < to; i++) {
      let row = known.get(i);
      if (!row) {
        row = createRow(i);
        box.append(row);
      }
      row.style.transform = `translateY(${i * rowHeight()}px)`;
      updateRow(row, serviceAt(i), href);
      setAttribute(row, "data-active", i === active ? "true" : null);
    }
    if (focusWhenDrawn) {
      const row = [...box.children].find((r) => r.index === active);
      if (row?.service) {
        focusWhenDrawn = false;
        row.querySelector("a").focus({ preventScroll: true });
      }
    }
  }

  // load requests the windows in sight: all of them, or those that are missing.
  async function load(which) {
    const { from, to } = inSight();
    const mine = generation;
    const numbers = [];
    for (let n = Math.floor(from / windowSize); n * windowSize < Math.max(to, 1); n++) {
      if (which === "all" || !windows.has(n)) numbers.push(n);
    }
    const answers = await Promise.all(numbers.map((n) => fetchWindow(n * windowSize, windowSize)));
    if (mine !== generation || answers.length === 0) return;
    if (answers[0].total !== total) windows = new Map();
    answers.forEach((answer, i) => windows.set(numbers[i], answer.services));
    const last = answers.at(-1);
    total = last.total;
    setAttribute(byId("services"), "aria-rowcount", total + 1);
    draw();
    return last;
  }

  box.addEventListener("scroll", () => {
    draw();
    clearTimeout(timer);
    timer = setTimeout(() => load("missing").then(() => draw()).catch(() => {}), scrollingPause); // a poll shows the error
  });
  box.addEventListener("click", (event) => {
    const row = event.target.closest("[role=row]");
    if (!row?.service || event.ctrlKey || event.metaKey || event.shiftKey || event.button !== 0) return;
    event.preventDefault();
    active = row.index;
    onOpen({ namespace: row.service.namespace, name: row.service.name });
  });
  new ResizeObserver(draw).observe(box);

  return {
    refresh: () => load("all"),
    // restart forgets everything, for another search.
    restart() {
      generation++;
      windows = new Map();
      active = -1;
      box.scrollTop = 0;
    },
    // move makes another Service the active one, and focuses it.
    move(step) {
      if (total === 0) return;
      active = active < 0 ? Math.ceil(box.scrollTop / rowHeight()) : Math.min(total - 1, Math.max(0, active + step));
      const top = active * rowHeight();
      if (top < box.scrollTop) box.scrollTop = top;
      else if (top + rowHeight() > box.scrollTop + box.clientHeight) box.scrollTop = top + rowHeight() - box.clientHeight;
      focusWhenDrawn = true;
      draw();
      load("missing").catch(() => {});
    },
    // focusActive focuses the Service that was open.
    focusActive() {
      focusWhenDrawn = active >= 0;
      draw();
    },
  };
}

function createRow(index) {
  const row = element("div", { class: "row", role: "row", "aria-rowindex": index + 2 },
    element("span", { role: "cell" }, element("a", {}, element("span", { class: "quiet" }), element("strong"))),
    element("span", { role: "cell" }), element("span", { role: "cell" }), element("span", { role: "cell" }), element("span", { role: "cell" }));
  row.index = index;
  return row;
}

function updateRow(row, s, href) {
  if (row.service === s && s) return;
  row.service = s;
  const [name, verdict, addresses, ports, endpoints] = row.children;
  const [namespace, own] = name.firstElementChild.children;
  setAttribute(name.firstElementChild, "href", s ? href({ namespace: s.namespace, name: s.name }) : null);
  if (!s) {
    for (const node of [namespace, own, addresses, ports, endpoints]) setText(node, "");
    setText(verdict, "…");
    return;
  }
  if (!verdict.querySelector(".badge")) setText(verdict, "");
  setText(namespace, `${s.namespace}/`);
  setText(own, s.name);
  setBadge(verdict, s.verdict, verdictTone(s.verdict));
  setWhole(addresses, s.servicePorts.flatMap((p) => [p.clusterIP ?? [], p.loadBalancerVIPs, p.externalIPs].flat()));
  setWhole(ports, s.servicePorts.map((p) => `${p.port}${p.nodePort ? `:${p.nodePort}` : ""}/${p.protocol}`));
  let usable = 0, all = 0;
  for (const p of s.servicePorts) {
    usable += p.endpointsUsable;
    all += p.endpointsAll;
  }
  setText(endpoints, `${count(usable)} of ${count(all)} usable`);
}

// setWhole shows different texts in a cell, all of them on demand.
function setWhole(cell, texts) {
  const different = [...new Set(texts)];
  setText(cell, different.join(", "));
  setAttribute(cell, "title", different.length > 1 ? different.join(", ") : null);
}

// showCount says how many Services are found.
export function showCount(total, searching) {
  setText(byId("count"), total === 0 && searching ? "No Service matches. Headless Services are not listed." : counted(total, "Service"));
}
