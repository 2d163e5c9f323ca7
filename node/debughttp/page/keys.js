// The keys of the page.

import { byId } from "./dom.js";

export function startKeys({ move, close }) {
  const help = byId("help");
  byId("help-button").addEventListener("click", () => help.showModal());
  const actions = {
    "/": () => { byId("search").focus(); byId("search").select(); },
    "?": () => help.showModal(),
    j: () => move(1),
    k: () => move(-1),
  };
  document.addEventListener("keydown", (event) => {
    if (help.open || event.ctrlKey || event.metaKey || event.altKey) return;
    if (event.key === "Escape") {
      close();
      return;
    }
    if (event.target === byId("search") && (event.key === "ArrowDown" || event.key === "Enter")) {
      event.preventDefault();
      move(1);
      return;
    }
    const inRows = byId("rows").contains(event.target);
    const step = inRows && { ArrowDown: 1, ArrowUp: -1, PageDown: 10, PageUp: -10 }[event.key];
    if (step) {
      event.preventDefault();
      move(step);
      return;
    }
    if (event.target.closest("input, select, textarea") || !actions[event.key]) return;
    event.preventDefault();
    actions[event.key]();
  });
}
