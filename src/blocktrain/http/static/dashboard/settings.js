// The settings of the run, from /v1/run, as lists of names and values.
import { element } from "./view.js";

const shown = (value) => (value === null ? "–" : typeof value === "string" ? value : JSON.stringify(value));

function group(name, values) {
  const pairs = Object.entries(values).flatMap(([key, value]) => [element("dt", {}, key), element("dd", {}, shown(value))]);
  return element("section", {}, element("h3", {}, name), element("dl", {}, ...pairs));
}

export function showSettings(spec) {
  const isTable = (value) => value !== null && typeof value === "object" && !Array.isArray(value);
  const top = Object.fromEntries(Object.entries(spec).filter(([, value]) => !isTable(value)));
  const tables = Object.entries(spec).filter(([, value]) => isTable(value));
  document.getElementById("settings-groups").replaceChildren(group("run", top), ...tables.map(([name, values]) => group(name, values)));
}

// What the run counts as its text: bytes, or the tokens of its tokenizer
export const textUnit = (spec) => ((spec?.corpus?.tokenizer ?? "bytes") === "bytes" ? "bytes" : "tokens");
