// The playground: streams a completion from /v1/completions and shows the text and its figures as they arrive.
// Everything that came from the server is set as text, never as HTML. stream.js reads the events, race.js is the race.
import { coloured } from "./drafts.js";
import { race } from "./race.js";
import { events, textEnd } from "./stream.js";

const byId = (id) => document.getElementById(id);
const KEY = "blocktrain-api-key"; // in sessionStorage: gone with the tab
let model = null;
let asked = 0; // tokens that the current request asked for
let running = null; // the AbortController of the current request

const count = (number) => number.toLocaleString("en", { maximumFractionDigits: 0 });
const ratio = (number) => number.toLocaleString("en", { maximumFractionDigits: number < 10 ? 2 : 1 });
const time = (seconds) => (seconds < 1 ? `${Math.round(seconds * 1000)} ms` : `${seconds.toFixed(2)} s`);
const plural = (number, word) => `${count(number)} ${word}${number === 1 ? "" : "s"}`;

function headers() {
  const key = byId("key").value.trim();
  return { "Content-Type": "application/json", ...(key ? { Authorization: `Bearer ${key}` } : {}) };
}

async function refusal(response) {
  const reply = await response.json().catch(() => null);
  if (response.status === 401) askForKey();
  return new Error(reply?.error?.message ?? `the gateway answered with status ${response.status}`);
}

function sentence(error) {
  if (error instanceof TypeError) return "The gateway does not answer. Is it still running?";
  const words = String(error.message ?? error).trim().replace(/^max_tokens = /, "length ").replace(/^(\w+) = /, "$1 ");
  return words.charAt(0).toUpperCase() + words.slice(1) + (/[.!?]$/.test(words) ? "" : ".");
}

function showProblem(text) {
  byId("problem").textContent = text;
  byId("problem").hidden = !text;
}

// The model and its modes

async function loadModel() {
  try {
    const response = await fetch("v1/models", { headers: headers() });
    if (!response.ok) throw await refusal(response);
    model = (await response.json()).data[0];
    showModel();
    showProblem("");
  } catch (error) {
    byId("model").textContent = "No model yet";
    showProblem(sentence(error));
  }
}

function unit() {
  return model?.tokenizer === "bpe" ? "token" : "byte"; // what the model reads and writes
}

function showModel() {
  byId("model").textContent =
    `${model.id} · ${plural(model.blocks, "block")} · reads ${count(model.context)} ${unit()}s · version ${model.version.slice(0, 12)}`;
  byId("length").max = model.max_tokens;
  for (const word of document.querySelectorAll(".unit")) word.textContent = word.textContent.replace(/byte|token/, unit());
  if (model.longest_sweep > 0) {
    byId("candidates").value = "";
    byId("candidates").placeholder = "none";
    byId("candidates-hint").textContent = "A sweep turns noise into text. With candidates, it makes so many drafts instead, and the model picks one.";
  }
  for (const choice of document.querySelectorAll("[name=mode]")) choice.disabled = !model.modes.includes(choice.value);
  if (document.querySelector("[name=mode]:checked")?.disabled) document.querySelector("[name=mode]:enabled").checked = true;
  fitToMode();
  measurePrompt();
}

function askForKey() {
  byId("key-row").hidden = false;
  byId("key").focus();
}

// The form

const mode = () => document.querySelector("[name=mode]:checked").value;

function fitToMode() {
  const sweeps = mode() === "sweep";
  byId("candidates").disabled = !sweeps;
  byId("temperature").disabled = sweeps && model?.longest_sweep > 0 && byId("candidates").value === "";
  showCurl();
}

function measurePrompt() {
  const size = new TextEncoder().encode(byId("prompt").value).length;
  if (model && unit() === "token") {
    byId("prompt-size").textContent = `${plural(size, "byte")}; it reads the last ${count(model.context)} tokens.`;
    return showCurl();
  }
  const tooLong = model !== null && size > model.context;
  const excess = tooLong ? " The model reads only the end of it." : "";
  byId("prompt-size").textContent = model ? `${count(size)} of ${count(model.context)} bytes.${excess}` : "";
  showCurl();
}

function question() {
  const fields = { prompt: byId("prompt").value, mode: mode(), max_tokens: Number(byId("length").value) };
  if (!byId("temperature").disabled) fields.temperature = Number(byId("temperature").value);
  if (!byId("candidates").disabled && byId("candidates").value !== "") fields.candidates = Number(byId("candidates").value);
  if (byId("seed").value !== "") fields.seed = Number(byId("seed").value);
  return fields;
}

function showCurl() {
  const body = JSON.stringify(question()).replaceAll("'", "'\\''");
  const key = byId("key-row").hidden ? "" : `  -H "Authorization: Bearer $BLOCKTRAIN_API_KEY" \\\n`;
  const address = new URL("v1/completions", location.href);
  byId("curl").textContent = `curl ${address} \\\n${key}  -H "Content-Type: application/json" \\\n  -d '${body}'`;
}

// A request

// `prompt` is the text so far if the writing goes on, otherwise the prompt of the form
async function write(prompt = null) {
  if (running) return;
  running = new AbortController();
  begin();
  let last = null;
  try {
    const asks = { ...question(), ...(prompt === null ? {} : { prompt }) };
    const body = JSON.stringify({ ...asks, stream: true });
    const response = await fetch("v1/completions", { method: "POST", headers: headers(), body, signal: running.signal });
    if (!response.ok) throw await refusal(response); // the text before stays
    if (prompt === null) startWith(asks.prompt);
    for await (const event of events(response)) {
      if (event.error) throw new Error(event.error.message);
      last = show(event, last);
    }
    end(last, last ? "Done" : "No text");
  } catch (error) {
    if (error.name !== "AbortError") showProblem(sentence(error));
    end(last, error.name === "AbortError" ? "Stopped" : last ? "Ended early" : "Nothing was written");
  }
}

// Never too long: it is cut to what the model reads, or a little more if its tokens are longer than a byte.
function goOn() {
  const text = byId("given").textContent + byId("written").textContent;
  write(textEnd(text, model.context * (model.tokenizer === "bpe" ? 16 : 1)));
}

function startWith(prompt) {
  byId("given").textContent = prompt;
  byId("written").replaceChildren();
  byId("empty").hidden = true;
  byId("output").scrollTop = byId("output").scrollHeight; // a long prompt would hide what is written
}

function begin() {
  showProblem("");
  asked = Number(byId("length").value);
  byId("draft-key").hidden = mode() === "autoregressive";
  byId("continue").disabled = true;
  byId("strip").replaceChildren();
  for (const id of ["traversals", "per-traversal", "first-byte", "speed"]) byId(id).textContent = "–";
  byId("status").textContent = "Writing…";
  byId("output").setAttribute("aria-busy", "true"); // screen readers read the whole text once, not byte by byte
  bringIntoView(byId("output-title"));
  byId("write").disabled = true;
  byId("stop").disabled = false;
}

function bringIntoView(element) {
  const calm = matchMedia("(prefers-reduced-motion: reduce)").matches;
  const { top } = element.getBoundingClientRect();
  if (top < 0 || top > innerHeight * 0.7) element.scrollIntoView({ behavior: calm ? "auto" : "smooth" });
}

function show(event, last) {
  const effort = event.blocktrain;
  const text = event.choices[0]?.text ?? "";
  const output = byId("output");
  const following = output.scrollHeight - output.scrollTop - output.clientHeight < 40;
  if (text) {
    byId("written").append(coloured(text, effort, last?.effort));
  }
  if (following) output.scrollTop = output.scrollHeight;
  showBars(effort, last?.effort);
  showFigures(effort);
  return { effort, finish: event.choices[0]?.finish_reason ?? last?.finish, version: event.system_fingerprint };
}

function showBars(effort, before) {
  const traversals = effort.traversals - (before?.traversals ?? 0);
  const tokens = effort.tokens_written - (before?.tokens_written ?? 0);
  const strip = byId("strip");
  const rest = strip.lastElementChild ?? strip.appendChild(Object.assign(document.createElement("i"), { className: "rest" }));
  for (let each = 0; each < traversals; each += 1) {
    const bar = document.createElement("i");
    bar.style.flexGrow = tokens / traversals;
    rest.before(bar);
  }
  rest.style.flexGrow = Math.max(asked - effort.tokens_written, 0);
  rest.hidden = effort.tokens_written >= asked;
  strip.classList.toggle("dense", strip.childElementCount > 60);
  strip.classList.toggle("denser", strip.childElementCount > 250);
  strip.setAttribute("aria-label", `${plural(effort.traversals, "traversal")} produced ${plural(effort.tokens_written, unit())}`);
}

function showFigures(effort) {
  byId("traversals").textContent = count(effort.traversals);
  byId("per-traversal").textContent = ratio(effort.bytes_per_traversal);
  if (effort.first_byte_s !== null) byId("first-byte").textContent = time(effort.first_byte_s);
  if (effort.seconds > 0) byId("speed").textContent = ratio(effort.bytes_written / effort.seconds);
}

function end(last, word) {
  running = null;
  byId("output").setAttribute("aria-busy", "false");
  byId("write").disabled = false;
  byId("stop").disabled = true;
  byId("continue").disabled = byId("written").textContent === "";
  const facts = last
    ? [plural(last.effort.bytes_written, "byte"), `in ${time(last.effort.seconds)}`, `seed ${last.effort.seed}`]
    : [];
  if (last?.effort.prompt_bytes_unread) {
    facts.push(`the first ${plural(last.effort.prompt_bytes_unread, "byte")} of the prompt were not read`);
  }
  if (last?.effort.degraded) facts.push("answered without a missing stage");
  byId("status").textContent = [word, ...facts].join(" · ");
}

// Wiring

byId("key").value = sessionStorage.getItem(KEY) ?? "";
byId("key-row").hidden = !byId("key").value;
byId("key").addEventListener("change", () => {
  sessionStorage.setItem(KEY, byId("key").value.trim());
  loadModel();
});
byId("ask").addEventListener("submit", (event) => {
  event.preventDefault();
  write();
});
byId("ask").addEventListener("input", () => {
  fitToMode();
  measurePrompt();
});
byId("continue").addEventListener("click", goOn);
byId("start-race").addEventListener("click", () => race(question(), headers(), model));
byId("stop").addEventListener("click", () => running?.abort());
document.addEventListener("keydown", (event) => {
  if (event.key === "Enter" && (event.ctrlKey || event.metaKey)) write();
  if (event.key === "Escape") running?.abort();
});
showCurl();
loadModel();
