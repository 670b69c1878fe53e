// Starts the parts of the page: theme, views, the API key.

import { Chat } from "./chat.js";
import { byId } from "./dom.js";
import { EngineView } from "./engine.js";
import { ask, key } from "./server.js";

const THEME = "ostinato-theme";
const dark = matchMedia("(prefers-color-scheme: dark)");

const system = () => (dark.matches ? "dark" : "light");

function applyTheme() {
  const chosen = localStorage.getItem(THEME);
  if (chosen) document.documentElement.dataset.theme = chosen;
  else delete document.documentElement.dataset.theme;
}

applyTheme();
dark.addEventListener("change", () => engine.draw());
byId("theme").addEventListener("click", () => {
  const next = (localStorage.getItem(THEME) || system()) === "dark" ? "light" : "dark";
  // If the chosen theme is the system's theme, follow the system again.
  if (next === system()) localStorage.removeItem(THEME);
  else localStorage.setItem(THEME, next);
  applyTheme();
  engine.draw();
});

for (const name of ["chat", "engine"]) {
  byId(`tab-${name}`).addEventListener("click", () => {
    document.body.dataset.view = name;
    for (const other of ["chat", "engine"]) {
      byId(`tab-${other}`).setAttribute("aria-pressed", String(other === name));
    }
    engine.draw();
  });
}

const dialog = byId("key-dialog");

function askForKey(error) {
  byId("key").hidden = false;
  if (dialog.open) return;
  byId("key-problem").textContent = key.get() && error ? error.message : "";
  byId("key-input").value = "";
  dialog.showModal();
}

byId("key").addEventListener("click", () => askForKey(null));
byId("key-cancel").addEventListener("click", () => dialog.close());
byId("key-form").addEventListener("submit", async (event) => {
  event.preventDefault();
  key.set(byId("key-input").value.trim());
  try {
    await ask("/debug/state");
  } catch (error) {
    byId("key-problem").textContent = error.message;
    return;
  }
  dialog.close();
  engine.start();
});

const chat = new Chat({ onRefused: askForKey });
const engine = new EngineView({ onRefused: askForKey, onModel: (model) => chat.setModel(model) });
engine.start();
