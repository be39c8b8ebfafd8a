// The two charts, drawn with plotly, and the same numbers as a sentence and a table.
import { nats, plural } from "./words.js";
import { element, table } from "./view.js";

let plotly = null; // a promise; plotly is loaded with the first chart

function library() {
  plotly ??= new Promise((resolve, reject) => {
    const script = element("script", { src: "page/plotly.min.js" });
    script.addEventListener("load", () => resolve(window.Plotly));
    script.addEventListener("error", () => reject(new Error("plotly could not be loaded")));
    document.head.append(script);
  });
  return plotly;
}

const colour = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();
const series = (index) => {
  const all = colour("--series").split(",");
  return all[index % all.length].trim();
};

function timeAxis(points, began_s) {
  const longest_s = Math.max(0, ...points.map((point) => point.at_s - began_s));
  const [unit_s, name] = longest_s > 7200 ? [3600, "hours"] : longest_s > 180 ? [60, "minutes"] : [1, "seconds"];
  return { at: (point) => (point.at_s - began_s) / unit_s, title: `${name} since the first point` };
}

function layout(x_title, few) {
  const axis = { gridcolor: colour("--line"), zerolinecolor: colour("--line"), linecolor: colour("--line"), automargin: true };
  return {
    paper_bgcolor: "transparent", plot_bgcolor: "transparent", hovermode: "x unified", showlegend: true,
    font: { family: colour("--sans"), size: 12, color: colour("--soft") },
    hoverlabel: { bgcolor: colour("--card"), bordercolor: colour("--line"), font: { color: colour("--ink") } },
    margin: { l: 8, r: 12, t: 8, b: 8 }, legend: { orientation: "h", y: 1.02, yanchor: "bottom", x: 0 },
    xaxis: { ...axis, title: { text: x_title }, rangemode: few ? "normal" : "tozero" }, yaxis: { ...axis, title: { text: "nats/byte" } },
  };
}

async function draw(id, traces, x_title) {
  const Plotly = await library();
  const few = traces.every((trace) => trace.x.length < 2);
  await Plotly.react(document.getElementById(id), traces, layout(x_title, few), { displayModeBar: false, responsive: true });
}

const line = (name, x, y, color, width, dash) => ({
  name, x, y, type: "scatter", mode: x.length > 60 ? "lines" : "lines+markers", line: { color, width, dash }, marker: { color, size: width + 3 },
});

function describe(id, sentence) {
  document.getElementById(id).setAttribute("aria-label", sentence);
  document.getElementById(`${id}-text`).textContent = sentence;
}

export function drawHeldOut(points) {
  if (points.length === 0) return;
  const [first, last] = [points[0], points[points.length - 1]];
  const axis = timeAxis(points, first.at_s);
  const blocks = [...new Set(points.flatMap((point) => Object.keys(point.blocks)))].sort((a, b) => a - b);
  const traces = blocks.map((block) => {
    const scored = points.filter((point) => block in point.blocks);
    return line(`block ${block} alone`, scored.map(axis.at), scored.map((point) => point.blocks[block]), series(Number(block)), 1.5, "dot");
  });
  traces.push(line("composed", points.map(axis.at), points.map((point) => point.nats_per_byte), colour("--accent"), 3));
  const change = points.length > 1 ? ` (at first ${nats(first.nats_per_byte)})` : "";
  describe("held-out", `The composed model scores ${nats(last.nats_per_byte)} nats/byte${change}, after ${plural(points.length, "evaluation")}.`);
  table(document.getElementById("held-out-table"), "Cross entropy on held-out text, nats/byte", [axis.title, "composed", ...blocks.map((block) => `block ${block}`)],
    points.map((point) => [axis.at(point).toFixed(1), nats(point.nats_per_byte), ...blocks.map((block) => (block in point.blocks ? nats(point.blocks[block]) : "–"))]));
  draw("held-out", traces, axis.title);
}

export function drawTraining(curves) {
  const all = curves.flatMap((curve) => curve.points);
  if (all.length === 0) return;
  const axis = timeAxis(all, Math.min(...all.map((point) => point.at_s)));
  const name = (curve) => `phase ${curve.phase + 1} (${curve.blocks.length > 1 ? "blocks" : "block"} ${curve.blocks.join(", ")})`;
  const traces = curves.map((curve) =>
    line(name(curve), curve.points.map(axis.at), curve.points.map((point) => point.nats_per_byte), series(curve.phase), 2));
  const newest = curves.map((curve) => `${name(curve)} at ${nats(curve.points[curve.points.length - 1].nats_per_byte)}`);
  describe("training", `Training loss in nats/byte: ${newest.join(", ")}, after ${plural(all.length, "round")}.`);
  table(document.getElementById("training-table"), "Mean training loss of each round, nats/byte", ["phase", "round", axis.title, "loss", "updates"],
    curves.flatMap((curve) => curve.points.map((point) => [curve.phase + 1, point.round, axis.at(point).toFixed(1), nats(point.nats_per_byte), point.updates])));
  draw("training", traces, axis.title);
}
