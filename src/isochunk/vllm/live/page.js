"use strict";
// The page of one server. It draws what /isochunk/view, /isochunk/plan and /isochunk/status answer, and computes nothing
// of its own but places on the screen.

const EVERY_MS = 5000;
const MOST_DOTS = 2000;
const byId = (id) => document.getElementById(id);
let key = "";

async function ask(path, options = {}) {
  const headers = key ? { Authorization: `Bearer ${key}` } : {};
  const response = await fetch(`isochunk/${path}`, { ...options, headers });
  const body = await response.json().catch(() => ({}));
  if (response.status === 401) byId("login").hidden = false;
  if (!response.ok) throw new Error(body.error || body.detail || `${response.status} ${response.statusText}`);
  return body;
}

const SVG = "http://www.w3.org/2000/svg";
function shape(name, attributes, text) {
  const element = document.createElementNS(SVG, name);
  for (const [attribute, value] of Object.entries(attributes)) element.setAttribute(attribute, value);
  if (text !== undefined) element.textContent = text;
  return element;
}
function picture(width, height, label) {
  return shape("svg", { viewBox: `0 0 ${width} ${height}`, role: "img", "aria-label": label });
}
const seconds = (value) => (value === null || value === undefined ? "-" : `${Number(value.toPrecision(3))} s`);
const count = (value) => value.toLocaleString("en");

function headline(status) {
  byId("version").textContent = status.version;
  const ended = status.prompts.filter((prompt) => prompt.predicted_ttft_s && prompt.alone);
  const last = ended[ended.length - 1];
  const state = status.model === null ? "No cost model yet: vLLM's own chunks are used." : `Policy ${status.policy}.`;
  const prompt = last
    ? ` The last prompt alone, ${count(last.tokens)} tokens in ${last.chunks.length} chunks: first token after ` +
      `${seconds(last.measured_ttft_s)}, predicted ${seconds(last.predicted_ttft_s)}.`
    : " No prompt has run alone yet.";
  byId("headline").textContent = state + prompt;
}

function timelines(view) {
  const place = byId("timelines");
  const pictures = view.timelines.map(timeline);
  place.replaceChildren(...(pictures.length ? pictures : ["No prompt has ended yet."]));
}

function timeline(prompt) {
  const width = 700, left = 56, lane = 16, gap = 4;
  const stages = prompt.stages.length;
  const ends = [...prompt.stages, ...(prompt.fixed ? prompt.fixed.stages : [])].map((steps) => steps[steps.length - 1][1]);
  const scale = (width - left - 4) / Math.max(...ends);
  const height = stages * (lane + gap) + 16;
  const words =
    `${count(prompt.tokens)} tokens${prompt.cached ? `, ${count(prompt.cached)} cached` : ""}, ${prompt.policy}, ` +
    `${prompt.chunks.length} ${prompt.chunks.length === 1 ? "chunk" : "chunks"}: ${seconds(prompt.measured_ttft_s)}` +
    (prompt.predicted_ttft_s ? ` (predicted ${seconds(prompt.predicted_ttft_s)})` : "") +
    (prompt.alone ? `, stages idle ${Math.round(100 * prompt.idle)}%` : "") +
    (prompt.fixed ? `; fixed ${prompt.fixed.chunks[0]}: ${seconds(prompt.fixed.ttft_s)}` : "") +
    (prompt.alone ? "" : "; beside others");
  const svg = picture(width, height, words);
  prompt.stages.forEach((steps, stage) => {
    const y = stage * (lane + gap);
    svg.append(shape("text", { x: 0, y: y + lane - 4 }, `stage ${stage + 1}`));
    svg.append(shape("rect", { class: "lane", x: left, y, width: width - left - 4, height: lane }));
    const bars = (list, name, dy, tall) =>
      list.forEach(([start, end], index) => {
        const bar = shape("rect", {
          class: index % 2 ? `${name} odd` : name,
          x: left + start * scale, y: y + dy, width: Math.max((end - start) * scale - 0.5, 0.5), height: tall,
        });
        bar.append(shape("title", {}, `${seconds(start)} to ${seconds(end)}`));
        svg.append(bar);
      });
    if (prompt.fixed) bars(prompt.fixed.stages[stage], "fixed", 0, lane);
    bars(steps, "bar", 3, lane - 6);
  });
  const y = height - 4;
  svg.append(shape("text", { x: left, y }, "0"));
  svg.append(shape("text", { x: width - 4, y, "text-anchor": "end" }, seconds(Math.max(...ends))));
  const figure = document.createElement("figure"), caption = document.createElement("figcaption");
  caption.textContent = words;
  figure.append(caption, svg);
  return figure;
}

function steps(view) {
  const dots = view.steps.filter(([, , predicted, measured]) => predicted > 0 && measured > 0).slice(-MOST_DOTS);
  const off = dots.map(([, , predicted, measured]) => Math.abs(predicted / measured - 1)).sort((a, b) => a - b);
  byId("steps-words").textContent = dots.length
    ? `${count(dots.length)} steps, ${(100 * off[Math.floor(off.length / 2)]).toFixed(1)}% off at the median. ` +
      "On the line the prediction is exact."
    : "No step with a prediction yet.";
  if (!dots.length) return byId("steps").replaceChildren();
  const width = 420, height = 300, left = 60, bottom = 34;
  const most = Math.max(...dots.map(([, , predicted, measured]) => Math.max(predicted, measured)));
  const x = (value) => left + (value / most) * (width - left - 8);
  const y = (value) => height - bottom - (value / most) * (height - bottom - 8);
  const svg = picture(width, height, byId("steps-words").textContent);
  svg.append(shape("line", { class: "axis", x1: left, y1: y(0), x2: width - 8, y2: y(0) }));
  svg.append(shape("line", { class: "axis", x1: left, y1: y(0), x2: left, y2: 8 }));
  svg.append(shape("line", { class: "exact", x1: x(0), y1: y(0), x2: x(most), y2: y(most) }));
  for (const [chunk, history, predicted, measured] of dots) {
    const dot = shape("circle", { class: "dot", cx: x(measured), cy: y(predicted), r: 2.5 });
    dot.append(shape("title", {}, `${chunk} tokens after ${history}: predicted ${seconds(predicted)}, measured ${seconds(measured)}`));
    svg.append(dot);
  }
  svg.append(shape("text", { x: width - 8, y: height - 18, "text-anchor": "end" }, `measured, to ${seconds(most)}`));
  svg.append(shape("text", { x: 0, y: 14 }, "predicted"));
  byId("steps").replaceChildren(svg);
}

function surface(view) {
  const told = view.surface;
  if (!told) return byId("surface").replaceChildren("There is no cost model yet.");
  const width = 520, height = 300, left = 60, bottom = 34;
  const values = told.seconds.flat();
  const low = Math.log(Math.min(...values)), high = Math.log(Math.max(...values));
  byId("surface-words").textContent =
    `Seconds of a step on one stage, by its new tokens and the history before them: ${seconds(Math.min(...values))} (pale) ` +
    `to ${seconds(Math.max(...values))} (strong).`;
  const svg = picture(width, height, byId("surface-words").textContent);
  const wide = (width - left) / told.chunks.length, tall = (height - bottom) / told.histories.length;
  told.seconds.forEach((row, j) =>
    row.forEach((value, i) => {
      const strength = high > low ? (Math.log(value) - low) / (high - low) : 1;
      const cell = shape("rect", {
        x: left + i * wide, y: height - bottom - (j + 1) * tall, width: wide + 0.5, height: tall + 0.5,
        class: "bar", "fill-opacity": 0.06 + 0.94 * strength,
      });
      cell.append(shape("title", {}, `${count(told.chunks[i])} tokens after ${count(told.histories[j])}: ${seconds(value)}`));
      svg.append(cell);
    }));
  const last = (list) => list[list.length - 1];
  svg.append(shape("text", { x: left, y: height - 18 }, count(told.chunks[0])));
  svg.append(shape("text", { x: width, y: height - 18, "text-anchor": "end" }, `${count(last(told.chunks))} new tokens`));
  svg.append(shape("text", { x: 0, y: height - bottom }, "0"));
  svg.append(shape("text", { x: 0, y: 12 }, count(last(told.histories))));
  svg.append(shape("text", { x: 0, y: 26 }, "history"));
  byId("surface").replaceChildren(svg);
}

function facts(status) {
  const pairs = [
    ...Object.entries(status.counters),
    ...Object.entries(status.model || {}).filter(([, value]) => typeof value === "number"),
    ["model from", status.source], ["drift", status.drift], ["resting", status.resting], ["stages", status.stages],
    ["max_num_batched_tokens", status.max_num_batched_tokens], ["alignment", status.alignment],
    ["running", status.queue.running], ["waiting", status.queue.waiting],
  ];
  byId("facts").replaceChildren(...pairs.flatMap(([name, value]) => {
    const term = document.createElement("dt"), told = document.createElement("dd");
    term.textContent = name;
    told.textContent = typeof value === "number" && !Number.isInteger(value) ? value.toPrecision(4) : String(value);
    told.dataset.name = name;
    return [term, told];
  }));
}

function policy(status) {
  if (byId("policy").contains(document.activeElement)) return; // somebody is choosing
  for (const choice of document.getElementsByName("policy")) choice.checked = choice.value === status.policy;
  byId("chunk").value = status.chunk ?? "";
  byId("chunk").max = status.max_num_batched_tokens;
}

async function refresh() {
  try {
    const told = await ask("view");
    byId("login").hidden = true;
    byId("main").hidden = false;
    headline(told.status);
    facts(told.status);
    policy(told.status);
    timelines(told);
    steps(told);
    surface(told);
    document.body.dataset.ready = "yes";
  } catch (error) {
    byId("headline").textContent = error.message;
  }
}

async function explain(event) {
  if (event) event.preventDefault();
  const place = byId("plan-words"), table = byId("plan-table");
  try {
    const told = await ask(`plan?tokens=${byId("tokens").value}&cached=${byId("cached").value}`);
    place.replaceChildren(...told.words.map((sentence) => {
      const line = document.createElement("p");
      line.textContent = sentence;
      return line;
    }));
    const rows = [["isochunk", told.chunks.length, told.ttft_s], ...told.alternatives.map((a) => [a.label, a.steps, a.ttft_s])];
    table.replaceChildren(row("th", ["cut", "steps", "first token", "times isochunk's"]), ...rows.map((cells, index) => {
      const line = row("td", [cells[0], cells[1], seconds(cells[2]), (cells[2] / told.ttft_s).toFixed(2)]);
      if (index === 0) line.className = "ours";
      return line;
    }));
  } catch (error) {
    place.textContent = error.message;
    table.replaceChildren();
  }
}

function row(kind, cells) {
  const line = document.createElement("tr");
  for (const cell of cells) {
    const element = document.createElement(kind);
    element.textContent = cell;
    line.append(element);
  }
  return line;
}

async function use(event) {
  event.preventDefault();
  const chosen = new FormData(byId("policy")).get("policy");
  const chunk = byId("chunk").value && chosen !== "optimal" ? Number(byId("chunk").value) : null;
  try {
    const told = await ask("policy", { method: "POST", body: JSON.stringify({ policy: chosen, chunk }) });
    byId("policy-answer").textContent = `now: ${told.policy}${told.chunk ? ` ${told.chunk}` : ""}`;
  } catch (error) {
    byId("policy-answer").textContent = error.message;
  }
  if (document.activeElement) document.activeElement.blur();
  refresh();
}

byId("plan").addEventListener("submit", explain);
byId("policy").addEventListener("submit", use);
byId("login").addEventListener("submit", (event) => {
  event.preventDefault();
  key = byId("key").value; // kept in this page's memory only
  refresh().then(() => explain());
});
refresh().then(() => explain());
setInterval(() => { if (!document.hidden) refresh(); }, EVERY_MS);
