// Buttons that copy the command with the same answer.

import { byId, element, setText } from "./dom.js";

// quoted is a word for a shell.
export const quoted = (text) => (/^[\w./:@=+,-]+$/.test(text) ? text : `'${text.replaceAll("'", `'\\''`)}'`);

// base is the URL that the page's paths are relative to.
const base = () => new URL(".", location.href).href;

export const curl = (path, parameters) => `curl -s ${quoted(base() + path + (Object.keys(parameters).length ? `?${new URLSearchParams(parameters)}` : ""))}`;

export const spctl = (...words) => ["spctl", `--address=${base().replace(/\/$/, "")}`, ...words].map(quoted).join(" ");

// showCopy fills a paragraph with a button for each command.
export function showCopy(place, commands) {
  const buttons = Object.entries(commands).map(([name, command]) => {
    const button = element("button", { type: "button", "data-command": command(), title: command() }, `Copy as ${name}`);
    button.addEventListener("click", () => copy(button, name, command()));
    return button;
  });
  byId(place).replaceChildren(...buttons);
}

async function copy(button, name, text) {
  setText(button, (await write(text)) ? "Copied" : "Not copied: the browser refuses");
  setTimeout(() => setText(button, `Copy as ${name}`), 1500);
}

// write uses the older interface where the page is not on a secure origin.
async function write(text) {
  try {
    await navigator.clipboard.writeText(text);
    return true;
  } catch {
    const area = element("textarea", { class: "offscreen" }, text);
    document.body.append(area);
    area.select();
    const done = document.execCommand("copy");
    area.remove();
    return done;
  }
}
