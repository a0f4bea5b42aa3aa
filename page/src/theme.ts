// Light or dark: the system's setting, until the user chooses one.

import { useEffect, useState } from "preact/hooks";

export type Theme = "system" | "light" | "dark";

const KEY = "astray-theme";

export function chosenTheme(): Theme {
  try {
    const held = localStorage.getItem(KEY);
    return held === "light" || held === "dark" ? held : "system";
  } catch {
    return "system"; // a file may have no storage
  }
}

export function choose(theme: Theme): void {
  const root = document.documentElement;
  if (theme === "system") root.removeAttribute("data-theme");
  else root.setAttribute("data-theme", theme);
  try {
    if (theme === "system") localStorage.removeItem(KEY);
    else localStorage.setItem(KEY, theme);
  } catch {
    // Then it holds until the page is closed.
  }
  dispatchEvent(new Event("astray-theme"));
}

/** A colour of the style sheet, as canvases need it. */
export function colour(name: string): string {
  return getComputedStyle(document.documentElement).getPropertyValue(`--${name}`).trim() || "#888";
}

/** A number that changes when colours may have changed, so that canvases are repainted. */
export function useTheme(): number {
  const [count, setCount] = useState(0);
  useEffect(() => onTheme(() => setCount((held) => held + 1)), []);
  return count;
}

function onTheme(callback: () => void): () => void {
  const system = matchMedia("(prefers-color-scheme: dark)");
  addEventListener("astray-theme", callback);
  system.addEventListener("change", callback);
  return () => {
    removeEventListener("astray-theme", callback);
    system.removeEventListener("change", callback);
  };
}
