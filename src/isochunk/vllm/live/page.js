"use strict";
// The page of one server. It draws what /isochunk/view, /isochunk/plan and /isochunk/status answer, and computes nothing
// of its own but places on the screen.

const EVERY_MS = 5000;
const byId = (id) => document.getElementById(id);
let key = "";
let shown = null; // the last view
let choosing = false; // somebody changed the policy's form and did not send it yet

async function ask(path, options = {}) {
  const headers = key ? { Authorization: `Bearer ${key}` } : {};
  const response = await fetch(`isochunk/${path}`, { ...options, headers }).catch(() => {
    throw new Error("The server does not answer; this page tries again.");
  });
  const body = await response.json().catch(() => ({}));
  if (response.status === 401) byId("login").hidden = false;
  if (!response.ok) throw new Error(reason(body) || `${response.status} ${response.statusText}`);
  return body;
}

function reason(body) {
  const told = body.error || body.detail;
  if (Array.isArray(told)) return told.map((each) => `${(each.loc || []).slice(-1)}: ${each.msg}`).join("; ");
  return told && told.message ? told.message : told;
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
// One shape for all bars of a kind: a shape for each takes a browser seconds at ten thousand steps.
const box = (x, y, width, height) => `M${x.toFixed(1)} ${y}h${width.toFixed(1)}v${height}h${(-width).toFixed(1)}z`;
const seconds = (value) => (value === null || value === undefined ? "-" : `${Number(value.toPrecision(3))} s`);
const count = (value) => value.toLocaleString("en");
const last = (list) => list[list.length - 1];
function say(id, text) {
  if (byId(id).textContent !== text) byId(id).textContent = text; // what is unchanged is not read out again
}
function extent(values) {
  let low = Infinity, high = -Infinity;
  for (const value of values) {
    if (value < low) low = value;
    if (value > high) high = value;
  }
  return [low, high];
}
function ticks(most, about) {
  const rough = most / about, unit = 10 ** Math.floor(Math.log10(rough));
  const step = [1, 2, 5, 10].map((times) => times * unit).find((each) => each >= rough);
  const found = [];
  for (let at = step; at < most; at += step) found.push(at);
  return found;
}

function headline(status) {
  say("version", status.version);
  const ended = status.prompts.filter((prompt) => prompt.predicted_ttft_s && prompt.alone);
  const prompt = last(ended);
  const state = status.model === null ? "No cost model yet: vLLM's own chunks are used." : `Policy ${status.policy}.`;
  say("headline", state + (prompt
    ? ` The last prompt alone, ${count(prompt.tokens)} tokens in ${prompt.chunks.length} ` +
      `${prompt.chunks.length === 1 ? "chunk" : "chunks"}: first token after ` +
      `${seconds(prompt.measured_ttft_s)}, predicted ${seconds(prompt.predicted_ttft_s)}.`
    : " No prompt has run alone yet."));
}

function timelines(view) {
  const place = byId("timelines");
  const pictures = view.timelines.map((prompt) => timeline(prompt, place.clientWidth));
  place.replaceChildren(...(pictures.length ? pictures : ["No prompt has ended yet."]));
}

function timeline(prompt, width) {
  const stages = prompt.stages.length;
  const left = 58, lane = stages > 8 ? 10 : 16, gap = stages > 8 ? 2 : 4;
  const lists = [...prompt.stages, ...(prompt.fixed ? prompt.fixed.stages : [])];
  const most = Math.max(...lists.map((steps) => last(steps)[1]));
  const scale = (width - left) / most;
  const height = stages * (lane + gap) + 18;
  const words =
    `${count(prompt.tokens)} tokens${prompt.cached ? `, ${count(prompt.cached)} cached` : ""}, ${prompt.policy}, ` +
    `${prompt.chunks.length} ${prompt.chunks.length === 1 ? "chunk" : "chunks"}: ${seconds(prompt.measured_ttft_s)}` +
    (prompt.predicted_ttft_s ? ` (predicted ${seconds(prompt.predicted_ttft_s)})` : "") +
    (prompt.alone ? `, stages idle ${Math.round(100 * prompt.idle)}%` : "") +
    (prompt.fixed ? `; fixed ${prompt.fixed.chunks[0]}: ${seconds(prompt.fixed.ttft_s)}` : "") +
    (prompt.alone ? "" : "; beside others");
  const svg = picture(width, height, `Timeline of ${stages} stages`);
  const paths = { lane: "", fixed: "", bar: "", "bar odd": "" };
  prompt.stages.forEach((steps, stage) => {
    const y = stage * (lane + gap);
    if (stages <= 8 || stage % 4 === 0 || stage === stages - 1) {
      svg.append(shape("text", { x: 0, y: y + lane - (lane > 12 ? 4 : 1) }, `stage ${stage + 1}`));
    }
    paths.lane += box(left, y, width - left, lane);
    if (prompt.fixed) for (const [start, end] of prompt.fixed.stages[stage]) {
      paths.fixed += box(left + start * scale, y, Math.max((end - start) * scale - 1, 0.5), lane);
    }
    steps.forEach(([start, end], index) => {
      paths[index % 2 ? "bar odd" : "bar"] += box(left + start * scale, y + 2, (end - start) * scale, lane - 4);
    });
  });
  for (const [name, d] of Object.entries(paths)) if (d) svg.append(shape("path", { class: name, d }));
  const end = seconds(most);
  svg.append(shape("text", { x: left, y: height - 4 }, "0"));
  for (const at of ticks(most, width / 160)) {
    const x = left + at * scale;
    if (x < width - 60) svg.append(shape("text", { x, y: height - 4, "text-anchor": "middle" }, seconds(at)));
  }
  svg.append(shape("text", { x: width, y: height - 4, "text-anchor": "end" }, end));
  svg.append(shape("title", {}, ""));
  svg.addEventListener("pointermove", (event) => {
    const place = svg.getBoundingClientRect();
    const moment = (event.clientX - place.left - left) / scale;
    const stage = Math.floor((event.clientY - place.top) / (lane + gap));
    const step = (prompt.stages[stage] || []).findIndex(([start, ends]) => start <= moment && moment < ends);
    svg.querySelector("title").textContent = step < 0 ? "" :
      `chunk ${step + 1} of ${prompt.chunks[step]} tokens on stage ${stage + 1}: ` +
      prompt.stages[stage][step].map(seconds).join(" to ");
  });
  const figure = document.createElement("figure"), caption = document.createElement("figcaption");
  caption.textContent = words;
  figure.append(caption, svg);
  return figure;
}

function steps(view) {
  const dots = view.steps.filter(([, , predicted, measured]) => predicted > 0 && measured > 0);
  const off = dots.map(([, , predicted, measured]) => Math.abs(predicted / measured - 1)).sort((a, b) => a - b);
  say("steps-words", dots.length
    ? `${count(dots.length)} steps, ${(100 * off[Math.floor(off.length / 2)]).toFixed(1)}% off at the median. ` +
      "On the line the prediction is exact."
    : "No step with a prediction yet.");
  const place = byId("steps");
  if (!dots.length) return place.replaceChildren();
  const width = place.clientWidth, height = 300, left = 62, bottom = 38, top = 22;
  const [low, high] = extent(dots.flatMap(([, , predicted, measured]) => [predicted, measured])).map(Math.log);
  const room = Math.max(0.15, (Math.LN10 - (high - low)) / 2); // a decade at least, so that there are numbers at the axes
  const from = low - room, to = high + room;
  const x = (value) => left + ((Math.log(value) - from) / (to - from)) * (width - left - 4);
  const y = (value) => height - bottom - ((Math.log(value) - from) / (to - from)) * (height - bottom - top);
  const svg = picture(width, height, "Predicted against measured seconds of steps");
  let before = -Infinity;
  for (const at of decades(Math.exp(from), Math.exp(to))) {
    svg.append(shape("line", { class: "axis", x1: x(at), x2: x(at), y1: top, y2: height - bottom }));
    svg.append(shape("line", { class: "axis", x1: left, x2: width - 4, y1: y(at), y2: y(at) }));
    if (x(at) - before < 56) continue;
    before = x(at);
    svg.append(shape("text", { x: x(at), y: height - bottom + 15, "text-anchor": "middle" }, seconds(at)));
    svg.append(shape("text", { x: left - 6, y: y(at) + 4, "text-anchor": "end" }, seconds(at)));
  }
  svg.append(shape("line", { class: "exact", x1: left, y1: height - bottom, x2: width - 4, y2: top }));
  const d = dots.map(([, , predicted, measured]) => `M${x(measured).toFixed(1)} ${y(predicted).toFixed(1)}h0`).join("");
  svg.append(shape("path", { class: "dots", d }));
  svg.append(shape("text", { x: width - 4, y: height - 4, "text-anchor": "end" }, "measured"));
  svg.append(shape("text", { x: 0, y: 12 }, "predicted"));
  place.replaceChildren(svg);
}

function decades(low, high) {
  const found = [];
  for (let unit = 10 ** Math.floor(Math.log10(low)); unit <= high; unit *= 10) {
    found.push(...[1, 2, 5].map((times) => Number((times * unit).toPrecision(1))).filter((at) => low <= at && at <= high));
  }
  return found;
}

function surface(view) {
  const told = view.surface, place = byId("surface");
  if (!told) {
    say("surface-words", "There is no cost model yet.");
    return place.replaceChildren();
  }
  const width = place.clientWidth, height = 300, left = 62, bottom = 38, top = 22;
  const [least, most] = extent(told.seconds.flat());
  const low = Math.log(least), high = Math.log(most);
  say("surface-words",
    `Seconds of a step on one stage, by its new tokens and the history before them: ${seconds(least)} (pale) ` +
    `to ${seconds(most)} (strong).`);
  const svg = picture(width, height, "Cost of a step by chunk and history");
  const right = width - 4, columns = told.chunks.length, rows = told.histories.length;
  const x = (i) => Math.round(left + (i / columns) * (right - left));
  const y = (j) => Math.round(height - bottom - (j / rows) * (height - bottom - top));
  told.seconds.forEach((row, j) =>
    row.forEach((value, i) => {
      const strength = high > low ? (Math.log(value) - low) / (high - low) : 1;
      svg.append(shape("rect", {
        class: "cell", x: x(i), y: y(j + 1), width: x(i + 1) - x(i), height: y(j) - y(j + 1),
        "fill-opacity": (0.06 + 0.94 * strength).toFixed(3),
      }));
    }));
  svg.append(shape("title", {}, ""));
  svg.addEventListener("pointermove", (event) => {
    const at = svg.getBoundingClientRect();
    const i = Math.floor(((event.clientX - at.left - left) / (right - left)) * columns);
    const j = Math.floor(((height - bottom - (event.clientY - at.top)) / (height - bottom - top)) * rows);
    const value = (told.seconds[j] || [])[i];
    svg.querySelector("title").textContent = value === undefined ? "" :
      `${count(told.chunks[i])} tokens after ${count(told.histories[j])}: ${seconds(value)}`;
  });
  const every = Math.ceil((columns * 64) / (right - left));
  for (let i = 0; i < columns; i += every) {
    const middle = (x(i) + x(i + 1)) / 2;
    const anchor = middle + 24 > right ? "end" : "middle";
    svg.append(shape("text", { x: Math.min(middle, right), y: height - bottom + 15, "text-anchor": anchor }, count(told.chunks[i])));
  }
  for (let j = 0; j < rows; j += Math.ceil(rows / 6)) {
    svg.append(shape("text", { x: left - 6, y: (y(j) + y(j + 1)) / 2 + 4, "text-anchor": "end" }, count(told.histories[j])));
  }
  svg.append(shape("text", { x: right, y: height - 4, "text-anchor": "end" }, "new tokens"));
  svg.append(shape("text", { x: 0, y: 12 }, "history"));
  place.replaceChildren(svg);
}

function facts(status) {
  const pairs = [
    ...Object.entries(status.counters),
    ...Object.entries(status.model || {}).filter(([, value]) => typeof value === "number"),
    ["model from", status.source], ["drift", status.drift], ["resting", status.resting], ["stages", status.stages],
    ["max_num_batched_tokens", status.max_num_batched_tokens], ["alignment", status.alignment],
    ["running", status.queue.running], ["waiting", status.queue.waiting],
  ];
  byId("facts").replaceChildren(...pairs.map(([name, value]) => {
    const pair = document.createElement("div"), term = document.createElement("dt"), told = document.createElement("dd");
    term.textContent = name;
    told.textContent = typeof value === "number" && !Number.isInteger(value) ? value.toPrecision(4) : String(value ?? "-");
    told.dataset.name = name;
    pair.append(term, told);
    return pair;
  }));
}

function policy(status) {
  if (choosing) return;
  for (const choice of document.getElementsByName("policy")) choice.checked = choice.value === status.policy;
  byId("chunk").value = status.chunk ?? "";
  byId("chunk").max = status.max_num_batched_tokens;
  sized();
}

const chosen = () => new FormData(byId("policy")).get("policy");
function sized() {
  byId("chunk").disabled = chosen() === "optimal"; // a plan has no size of its own
}

function draw() {
  timelines(shown);
  steps(shown);
  surface(shown);
}

async function refresh() {
  try {
    shown = await ask("view");
    byId("login").hidden = true;
    byId("main").hidden = false;
    headline(shown.status);
    facts(shown.status);
    policy(shown.status);
    draw();
    document.body.dataset.ready = "yes";
  } catch (error) {
    say("headline", error.message);
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
    table.replaceChildren(row("th", ["cut", "steps", "first token", "ratio"]), ...rows.map((cells, index) => {
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
    if (kind === "th") element.scope = "col";
    element.textContent = cell;
    line.append(element);
  }
  return line;
}

async function use(event) {
  event.preventDefault();
  const name = chosen();
  const chunk = byId("chunk").value && name !== "optimal" ? Number(byId("chunk").value) : null;
  try {
    const told = await ask("policy", { method: "POST", body: JSON.stringify({ policy: name, chunk }) });
    say("policy-answer", `now: ${told.policy}${told.chunk ? ` ${told.chunk}` : ""}`);
  } catch (error) {
    say("policy-answer", error.message);
  }
  choosing = false;
  refresh();
}

byId("plan").addEventListener("submit", explain);
byId("policy").addEventListener("submit", use);
byId("policy").addEventListener("input", () => {
  choosing = true;
  sized();
});
byId("login").addEventListener("submit", (event) => {
  event.preventDefault();
  key = byId("key").value; // kept in this page's memory only
  refresh().then(() => explain());
});
addEventListener("resize", () => { if (shown) draw(); });
refresh();
explain();
setInterval(() => { if (!document.hidden) refresh(); }, EVERY_MS);
