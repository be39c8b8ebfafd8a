// The two charts, drawn with plotly, with their legends, and the same numbers as a sentence and a table.
import { axisOf, lossRange, smoothed } from "./timeline.js";
import { nats, plural } from "./words.js";
import { element, table } from "./view.js";

let plotly = null; // a promise; plotly is loaded with the first chart
const hidden = new Set(); // names of the lines that a reader has switched off

function library() {
  plotly ??= new Promise((resolve, reject) => {
    const script = element("script", { src: "page/plotly.min.js" });
    script.addEventListener("load", () => resolve(window.Plotly));
    script.addEventListener("error", () => reject(new Error("plotly could not be loaded")));
    document.head.append(script);
  });
  return plotly;
}

const byId = (id) => document.getElementById(id);
const colour = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();
const series = (index) => {
  const all = colour("--series").split(",");
  return all[index % all.length].trim();
};
const options = () => ({ kind: byId("axis").value, memory: Number(byId("smoothing").value), logarithmic: byId("log").checked });

function layout(axis, lines, logarithmic) {
  const look = { gridcolor: colour("--line"), zeroline: false, linecolor: colour("--line"), automargin: true };
  const values = lines.flatMap((line) => line.y);
  return {
    paper_bgcolor: "transparent", plot_bgcolor: "transparent", hovermode: "x unified", showlegend: false,
    font: { family: colour("--sans"), size: 12, color: colour("--soft") },
    hoverlabel: { bgcolor: colour("--card"), bordercolor: colour("--line"), font: { color: colour("--ink") } },
    margin: { l: 8, r: 12, t: 8, b: 8 },
    xaxis: { ...look, title: { text: axis.title }, range: [0, (axis.most || 1) * 1.03], rangemode: "tozero" },
    yaxis: { ...look, title: { text: "nats/byte" }, type: logarithmic ? "log" : "linear", range: lossRange(values.length ? values : [0, 5.545], logarithmic), nticks: 6, tickformat: ".3~r" },
  };
}

async function draw(id, lines, axis, logarithmic) {
  const Plotly = await library();
  byId(id).classList.remove("nothing"); // plotly measures its place when it draws for the first time
  const shown = lines.filter((line) => !hidden.has(line.name));
  await Plotly.react(byId(id), shown, layout(axis, shown.length ? shown : lines, logarithmic), { displayModeBar: false, responsive: true });
}

const line = (name, x, y, color, width, dash) => ({
  name, x, y, type: "scatter", mode: x.length > 60 ? "lines" : "lines+markers", line: { color, width, dash }, marker: { color, size: width + 3 },
});

function legend(id, lines, again) {
  byId(`${id}-legend`).replaceChildren(...lines.map((each) => {
    const swatch = element("i", { class: each.line.dash ? "dotted" : "" });
    swatch.style.borderColor = each.line.color;
    const button = element("button", { type: "button", "aria-pressed": String(!hidden.has(each.name)) }, swatch, each.name);
    button.addEventListener("click", () => {
      if (!hidden.delete(each.name)) hidden.add(each.name);
      again();
    });
    return element("li", {}, button);
  }));
}

function describe(id, sentence) {
  byId(id).setAttribute("aria-label", sentence);
  byId(`${id}-text`).textContent = sentence;
}

export function drawCharts(curves, status, text_unit) {
  const { kind, memory, logarithmic } = options();
  const axis = axisOf(kind, curves, status, text_unit);
  const again = () => drawCharts(curves, status, text_unit);
  for (const [id, make] of [["held-out", heldOutLines], ["training", trainingLines]]) {
    const lines = make(curves, axis, memory);
    if (!lines) continue;
    legend(id, id === "held-out" ? [lines[lines.length - 1], ...lines.slice(0, -1)] : lines, again); // composed first
    draw(id, lines, axis, logarithmic);
  }
}

function heldOutLines({ heldOut: points }, axis, memory) {
  if (points.length === 0) return null;
  const [first, last] = [points[0], points[points.length - 1]];
  const blocks = [...new Set(points.flatMap((point) => Object.keys(point.blocks)))].sort((a, b) => a - b);
  const lines = blocks.map((block) => {
    const scored = points.filter((point) => block in point.blocks);
    return line(`block ${block} alone`, scored.map(axis.at), smoothed(scored.map((point) => point.blocks[block]), memory), series(Number(block)), 1.5, "dot");
  });
  lines.push(line("composed", points.map(axis.at), smoothed(points.map((point) => point.nats_per_byte), memory), colour("--accent"), 3));
  const change = points.length > 1 ? ` (at first ${nats(first.nats_per_byte)})` : "";
  describe("held-out", `The composed model scores ${nats(last.nats_per_byte)} nats/byte${change}, after ${plural(points.length, "evaluation")}.`);
  table(byId("held-out-table"), "Cross entropy on held-out text, nats/byte", [axis.title, "composed", ...blocks.map((block) => `block ${block}`)],
    points.map((point) => [axis.at(point).toFixed(axis.digits), nats(point.nats_per_byte), ...blocks.map((block) => (block in point.blocks ? nats(point.blocks[block]) : "–"))]));
  return lines;
}

function trainingLines({ training: curves }, axis, memory) {
  const all = curves.flatMap((curve) => curve.points);
  if (all.length === 0) return null;
  const name = (curve) => `phase ${curve.phase + 1} (${curve.blocks.length > 1 ? "blocks" : "block"} ${curve.blocks.join(", ")})`;
  const newest = curves.map((curve) => `${name(curve)} at ${nats(curve.points[curve.points.length - 1].nats_per_byte)}`);
  describe("training", `Training loss in nats/byte: ${newest.join(", ")}, after ${plural(all.length, "round")}.`);
  table(byId("training-table"), "Mean training loss of each round, nats/byte", ["phase", "round", axis.title, "loss", "updates"],
    curves.flatMap((curve) => curve.points.map((point) => [curve.phase + 1, point.round, axis.at(point).toFixed(axis.digits), nats(point.nats_per_byte), point.updates])));
  return curves.map((curve) =>
    line(name(curve), curve.points.map(axis.at), smoothed(curve.points.map((point) => point.nats_per_byte), memory), series(curve.phase), 2));
}
