// The race: three modes continue one prompt at once, with a simulated distance between the hosts of the stages.
import { events } from "./stream.js";

const byId = (id) => document.getElementById(id);
const MODES = [["autoregressive", "Autoregressive"], ["speculative", "Speculative"], ["sweep", "Sweep"]];
const MOST = 100; // of the text: the slowest mode needs a traversal for each
const DRAFTS = 8; // of a sweep, also if the model could turn noise into text

function lane(name) {
  const make = (tag, kind = "", text = "") => Object.assign(document.createElement(tag), { className: kind, textContent: text });
  const [item, bar, cost, text] = [make("li"), make("span", "lane"), make("span", "cost", "starting"), make("p", "text")];
  bar.append(make("i"));
  item.append(make("b", "", name), bar, cost, text);
  byId("lanes").append(item);
  return { bar, cost, text };
}

async function run(shown, body, headers, finished) {
  const began = performance.now();
  const response = await fetch("v1/completions", { method: "POST", headers, body: JSON.stringify({ ...body, stream: true }) });
  if (!response.ok) throw new Error((await response.json().catch(() => null))?.error?.message ?? `the gateway answered with status ${response.status}`);
  for await (const event of events(response)) {
    if (event.error) throw new Error(event.error.message);
    const { traversals, bytes_written, tokens_written } = event.blocktrain;
    const seconds = (performance.now() - began) / 1000;
    shown.text.textContent += event.choices[0]?.text ?? "";
    shown.bar.firstChild.style.width = `${Math.min(100, (100 * (tokens_written ?? bytes_written)) / body.max_tokens)}%`;
    shown.cost.textContent = `${seconds.toFixed(1)} s · ${traversals} traversal${traversals === 1 ? "" : "s"} · ${bytes_written} bytes`;
  }
  return finished(shown, (performance.now() - began) / 1000);
}

export async function race(question, headers, model) {
  byId("start-race").disabled = true;
  byId("lanes").replaceChildren();
  byId("race-result").textContent = "";
  const { prompt, temperature = 0.7, seed = Math.floor(Math.random() * 1e6), max_tokens } = question;
  const common = { prompt, temperature, seed, max_tokens: Math.min(MOST, max_tokens), simulated_rtt_ms: Number(byId("rtt").value) };
  let winner = null;
  const finished = (shown, seconds) => {
    winner ??= shown.bar.classList.add("first") ?? true;
    return seconds;
  };
  try {
    const modes = MODES.filter(([mode]) => !model || model.modes.includes(mode));
    const times = await Promise.all(modes.map(([mode, name]) =>
      run(lane(name), { ...common, mode, ...(mode === "sweep" ? { candidates: DRAFTS } : {}) }, headers, finished).then((seconds) => [mode, name, seconds])));
    byId("race-result").textContent = verdict(times);
  } catch (error) {
    byId("race-result").textContent = `The race ended early: ${error.message}`;
  }
  byId("start-race").disabled = false;
}

function verdict(times) {
  const slow = times.find(([mode]) => mode === "autoregressive")?.[2];
  return times.filter(([mode]) => mode !== "autoregressive").map(([, name, seconds]) => `${name} took ${seconds.toFixed(1)} s${slow ? `, ${(slow / seconds).toFixed(1)} times as fast as autoregressive` : ""}`).join(". ") + ".";
}
