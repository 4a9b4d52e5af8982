"use strict";
// Draws the page from the values in the element "data". All text of the run goes through esc().

const data = JSON.parse(document.getElementById("data").textContent);
const byId = (id) => document.getElementById(id);
const esc = (text) => String(text).replace(/[&<>"']/g, (c) => `&#${c.charCodeAt(0)};`);

function number(x) {
  if (x === 0) return "0";
  const size = Math.abs(x);
  return size >= 1e6 || size < 1e-3 ? x.toExponential(2) : String(Number(x.toPrecision(size >= 1000 ? 6 : 4)));
}

function bytes(count) {
  for (const unit of ["B", "KiB", "MiB", "GiB"]) {
    if (count < 1024) return unit === "B" ? `${count} B` : `${count.toFixed(2)} ${unit}`;
    count /= 1024;
  }
  return `${count.toFixed(2)} TiB`;
}

function seconds(s) {
  for (const [scale, unit] of [[1, "s"], [1e-3, "ms"], [1e-6, "us"]]) {
    if (Math.abs(s) >= scale) return `${(s / scale).toFixed(2)} ${unit}`;
  }
  return s ? `${(s / 1e-9).toFixed(0)} ns` : "0 s";
}

const when = (time) => new Date(1000 * time).toISOString().replace("T", " ").slice(0, 19) + " UTC";

function table(head, rows, right) {
  const cell = (tag, html, i) => `<${tag}${right.includes(i) ? ' class="n"' : ""}>${html}</${tag}>`;
  const line = (tag, row) => `<tr>${row.map((html, i) => cell(tag, html, i)).join("")}</tr>`;
  return `<div class="box scroll"><table><thead>${line("th", head)}</thead>` +
    `<tbody>${rows.map((row) => line("td", row)).join("")}</tbody></table></div>`;
}

function showTip(event, text) {
  const tip = byId("tip");
  tip.textContent = text;
  tip.style.display = text ? "block" : "none";
  if (!text) return;
  const isRight = event.clientX > window.innerWidth / 2;
  tip.style.left = isRight ? "" : `${event.clientX + 14}px`;
  tip.style.right = isRight ? `${window.innerWidth - event.clientX + 14}px` : "";
  tip.style.top = `${event.clientY + 16}px`;
}

function ticks(low, high, most) {
  const rough = (high - low) / most || 1;
  const power = 10 ** Math.floor(Math.log10(rough));
  const step = [1, 2, 5, 10].map((m) => m * power).find((each) => each >= rough);
  const found = [];
  for (let at = Math.ceil(low / step - 1e-9); at * step <= high + step * 1e-9; at++) found.push(Number((at * step).toPrecision(12)));
  return found;
}

// A chart of lines over steps: lines are {label, colour, points: [[step, value], ...]}; bad are rows [step, "nan"].
function chart(id, title, lines, text, {bad = [], about = ""} = {}) {
  const box = byId(id);
  const width = Math.max(box.clientWidth - 26, 320), height = 170, left = 58, top = 8, bottom = 22;
  const points = lines.flatMap((line) => line.points);
  const steps = [...points, ...bad].map((p) => p[0]), values = points.length ? points.map((p) => p[1]) : [0];
  const least = (xs) => xs.reduce((a, b) => Math.min(a, b)), most = (xs) => xs.reduce((a, b) => Math.max(a, b));
  const first = least(steps), last = Math.max(most(steps), first + 1);
  let low = least(values), high = most(values);
  if (low === high) { low -= Math.abs(low) / 10 || 1; high += Math.abs(high) / 10 || 1; }
  const x = (step) => left + (step - first) / (last - first) * (width - left - 8);
  const y = (value) => top + (high - value) / (high - low) * (height - top - bottom);
  let svg = "";
  for (const at of ticks(low, high, 4)) {
    svg += `<line class="axis" x1="${left}" x2="${width - 8}" y1="${y(at)}" y2="${y(at)}"/>` +
      `<text x="${left - 6}" y="${y(at) + 4}" text-anchor="end">${esc(text(at))}</text>`;
  }
  for (const at of ticks(first, last, 6)) {
    if (Number.isInteger(at)) svg += `<text x="${x(at)}" y="${height - 6}" text-anchor="middle">${at}</text>`;
  }
  const marks = [...data.marks, ...bad.map(([step, value]) => [step, `${title} is ${value} in step ${step}`, true])];
  for (const [step, label, isBad] of marks.filter(([step]) => step >= first && step <= last)) {
    svg += `<line class="mark ${isBad ? "bad" : ""}" x1="${x(step)}" x2="${x(step)}" y1="${top}" y2="${height - bottom}">` +
      `<title>${esc(label)}</title></line>`;
  }
  lines = lines.filter((line) => line.points.length);
  for (const line of lines) {
    const path = line.points.map((p, i) => `${i ? "L" : "M"}${x(p[0]).toFixed(1)} ${y(p[1]).toFixed(1)}`).join("");
    svg += line.points.length > 1
      ? `<path class="curve" d="${path}" fill="none" stroke="${line.colour}" stroke-width="1.5"/>`
      : `<circle class="curve" cx="${x(line.points[0][0])}" cy="${y(line.points[0][1])}" r="3" fill="${line.colour}"/>`;
  }
  const now = about ? esc(about) : lines.map((line) => `<i style="color:${line.colour}">${esc(line.label)}</i>`).join(" ");
  box.innerHTML = `<h3>${esc(title)}<span>${now}</span></h3>` +
    `<svg viewBox="0 0 ${width} ${height}" role="img" aria-label="${esc(title)} over steps">${svg}</svg>`;
  box.addEventListener("mousemove", (event) => {
    const frame = box.getBoundingClientRect();
    const step = first + ((event.clientX - frame.left - 13) * width / (frame.width - 26) - left) / (width - left - 8) * (last - first);
    const nearest = (line) => line.points.reduce((a, b) => Math.abs(b[0] - step) < Math.abs(a[0] - step) ? b : a);
    const rows = lines.map((line) => [line.label, nearest(line)]);
    showTip(event, rows.length ? [`step ${rows[0][1][0]}`, ...rows.map(([label, p]) => `${label}: ${text(p[1])}`)].join("\n") : "");
  });
  box.addEventListener("mouseleave", (event) => showTip(event, ""));
}

function drawSummary() {
  const start = data.starts[data.starts.length - 1];
  const parts = [];
  if (data.last) parts.push(`${data.last[0] + 1}${start && start[2].total ? ` of ${start[2].total}` : ""} steps, the last at ${when(data.last[1])}`);
  for (const [name, curve] of Object.entries(data.series)) {
    if (curve.num_bad) parts.push(`${curve.num_bad} value${curve.num_bad > 1 ? "s" : ""} of ${name} ${curve.num_bad > 1 ? "are" : "is"} not finite`);
  }
  if (start) parts.push(`${start[2].mesh} on ${start[2].device}`);
  if (data.starts.length > 1) parts.push(`started ${data.starts.length} times`);
  if (data.saved.length) parts.push(`newest checkpoint after ${data.saved[data.saved.length - 1]} steps`);
  if (data.num_cut) parts.push(`${data.num_cut} line${data.num_cut > 1 ? "s" : ""} of the log could not be read`);
  byId("summary").textContent = parts.join(" · ");
}

function drawValues() {
  const names = Object.keys(data.series);
  byId("values").innerHTML = names.length
    ? names.map((name, i) => `<div class="box" id="value-${i}"></div>`).join("")
    : "<p>The run has logged no numbers: call run.log({\"loss\": metrics.loss}) in a step.</p>";
  names.forEach((name, i) => {
    const text = name.endsWith("nbytes") ? bytes : name.endsWith("_s") && !name.endsWith("per_s") ? seconds : number;
    const {points, every, bad, num_bad, last} = data.series[name];
    const about = [`last: ${typeof last === "number" ? text(last) : last}`];
    if (num_bad) about.push(`${num_bad} not finite`);
    if (every > 1) about.push(`of each ${every} values the least and the greatest`);
    chart(`value-${i}`, name, [{label: name, colour: "var(--accent)", points}], text, {bad, about: about.join(" · ")});
  });
}

// The timelines share one window of time, [view.from, view.to] in seconds.
const view = {from: 0, to: 1, spans: []};
const LANE = {compute: 28}, OTHER = 22, CURVE = 64, LEFT = 92;

function unitColours() {
  const units = [];
  for (const timeline of Object.values(data.timelines)) {
    for (const span of timeline.spans) if (span[2] && !units.includes(span[2])) units.push(span[2]);
  }
  return (unit, phase) => {
    if (!unit) return "var(--soft)";
    const hue = Math.round(units.indexOf(unit) * 137.5) % 360;
    return `hsl(${hue} 55% var(--${phase === "forward" ? "light" : "dark"}))`;
  };
}

// Spans that are one collective are one bar. The part of a bar behind the end of the step is drawn at its beginning.
function bars(timeline) {
  const found = new Map();
  for (const [op, kind, unit, phase, stream, start, stop, sent, memory, nbytes] of timeline.spans) {
    if (stop <= start) continue;
    const key = `${kind}/${stream}/${start}/${stop}`;
    const bar = found.get(key) || {ops: [], units: [], kind, phase, stream, start, stop, sent: 0, memory: []};
    bar.ops.push(op);
    bar.units.push(unit);
    bar.sent += sent;
    if (nbytes) bar.memory.push(`${bytes(nbytes)} at ${memory.toLocaleString("en")}`);
    found.set(key, bar);
  }
  return [...found.values()];
}

function describe(bar, name) {
  const lines = [`${bar.kind} ${bar.units.join(", ")}`.trim(), `${name}, ${bar.phase}, stream ${bar.stream}, op ${bar.ops.join(", ")}`];
  lines.push(`${seconds(bar.stop - bar.start)}, from ${seconds(bar.start)} to ${seconds(bar.stop)}`);
  if (bar.sent) lines.push(`sends ${bytes(bar.sent)}`);
  if (bar.memory.length) lines.push(`memory: ${bar.memory.join("; ")}`);
  return lines.join("\n");
}

function drawTimelines() {
  const box = byId("timeline"), width = Math.max(box.clientWidth, 480);
  const colour = view.colour, scale = (width - LEFT) / (view.to - view.from);
  const x = (second) => LEFT + (second - view.from) * scale;
  let svg = "", y = 4;
  view.spans = [];
  for (const [name, timeline] of Object.entries(data.timelines)) {
    const every = bars(timeline), length = timeline.step_s;
    svg += `<text x="0" y="${y + 12}">${esc(name)}: ${seconds(length)} a step, compute waits ${seconds(timeline.exposed_s)}, ` +
      `${(100 * timeline.overlap).toFixed(0)}% of the communication overlaps compute</text>`;
    y += 20;
    for (const stream of data.streams.filter((each) => every.some((bar) => bar.stream === each))) {
      const height = LANE[stream] || OTHER;
      svg += `<g class="lane"><text x="0" y="${y + height / 2 + 4}">${esc(stream)}</text>`;
      for (const bar of every.filter((each) => each.stream === stream)) {
        for (const shift of bar.stop > length ? [0, length] : [0]) {
          const from = Math.max(bar.start - shift, 0, view.from), to = Math.min(bar.stop - shift, length, view.to);
          if (to <= from) continue;
          const w = Math.max((to - from) * scale, 0.7);
          const fill = bar.kind === data.waiting ? "var(--bad)" : colour(bar.units[0], bar.phase);
          svg += `<rect class="span" data-i="${view.spans.length}" x="${x(from).toFixed(2)}" y="${y + 2}" width="${w.toFixed(2)}" ` +
            `height="${height - 4}" fill="${fill}"${bar.kind === data.waiting ? ' fill-opacity="0.35"' : ""}/>`;
          const label = bar.kind === data.waiting ? "wait" : bar.units[0] || bar.kind;
          if (w > 7 * label.length) {
            svg += `<text x="${(x(from) + 4).toFixed(1)}" y="${y + height / 2 + 4}" pointer-events="none">${esc(label)}</text>`;
          }
          view.spans.push(describe(bar, name));
        }
      }
      svg += "</g>";
      y += height;
    }
    y += 6;
    const peak = Math.max(timeline.peak_nbytes, 1), level = (n) => y + CURVE - n / peak * (CURVE - 8);
    const points = [];
    timeline.memory.forEach(([second, nbytes], i) => {
      const until = i + 1 < timeline.memory.length ? timeline.memory[i + 1][0] : length;
      if (until < view.from || second > view.to) return;
      points.push([x(Math.max(second, view.from)), level(nbytes)], [x(Math.min(until, view.to)), level(nbytes)]);
    });
    if (points.length) {
      const line = points.map((p) => `${p[0].toFixed(1)} ${p[1].toFixed(1)}`).join("L");
      svg += `<path class="memory" d="M${points[0][0].toFixed(1)} ${y + CURVE}L${line}L${points[points.length - 1][0].toFixed(1)} ${y + CURVE}Z" ` +
        `fill="var(--accent)" fill-opacity="0.3" stroke="var(--accent)"><title>live bytes of the arena</title></path>`;
    }
    svg += `<text x="0" y="${y + 14}">memory</text><text x="0" y="${y + 28}">peak</text><text x="0" y="${y + 42}">${bytes(timeline.peak_nbytes)}</text>`;
    y += CURVE + 14;
  }
  const grid = ticks(view.from, view.to, 8).map((at) => `<line class="axis" x1="${x(at)}" x2="${x(at)}" y1="0" y2="${y}"/>` +
    `<text x="${x(at)}" y="${y + 12}" text-anchor="middle">${seconds(at)}</text>`).join("");
  box.innerHTML = `<svg viewBox="0 0 ${width} ${y + 18}" role="img" aria-label="Timelines of a step">${grid}${svg}</svg>`;
}

function zoom(factor, middle) {
  const length = Math.min(Math.max((view.to - view.from) * factor, view.length / 1e4), view.length);
  const from = middle - (middle - view.from) * length / (view.to - view.from);
  move(from, length);
}

function move(from, length) {
  view.from = Math.min(Math.max(from, 0), view.length - length);
  view.to = view.from + length;
  drawTimelines();
}

function drawStep() {
  const timelines = Object.values(data.timelines);
  if (!timelines.length) {
    byId("step").innerHTML = "<h2>A step</h2><p>The run has logged no timeline: call run.log({\"predicted\": fs.inspect.predict(schedule, hardware), " +
      "\"measured\": trace.timeline(schedule)}) once.</p>";
    return;
  }
  byId("step").innerHTML = "<h2>A step</h2><p>A lane for each stream, and the live bytes of the arena. Units have colours, which are pale in the " +
    "forward; red is time in which compute waits. Wheel, + and - zoom; drag and the arrow keys move; 0 shows the whole step.</p>" +
    '<p><button id="in">+</button> <button id="out">-</button> <button id="all">whole step</button></p>' +
    '<div class="box"><div id="timeline" tabindex="0"></div></div>';
  view.length = timelines.reduce((most, each) => Math.max(most, each.step_s), 0) || 1;
  view.to = view.length;
  view.colour = unitColours();
  drawTimelines();
  const box = byId("timeline");
  const middle = () => (view.from + view.to) / 2, length = () => view.to - view.from;
  const at = (event) => {
    const frame = box.getBoundingClientRect();
    return view.from + Math.max(event.clientX - frame.left - LEFT, 0) / Math.max(frame.width - LEFT, 1) * length();
  };
  byId("in").addEventListener("click", () => zoom(0.5, middle()));
  byId("out").addEventListener("click", () => zoom(2, middle()));
  byId("all").addEventListener("click", () => move(0, view.length));
  box.addEventListener("wheel", (event) => { event.preventDefault(); zoom(event.deltaY < 0 ? 0.8 : 1.25, at(event)); }, {passive: false});
  box.addEventListener("keydown", (event) => {
    const keys = {
      "+": () => zoom(0.5, middle()), "-": () => zoom(2, middle()), 0: () => move(0, view.length),
      ArrowLeft: () => move(view.from - length() / 5, length()), ArrowRight: () => move(view.from + length() / 5, length()),
    };
    if (keys[event.key]) { event.preventDefault(); keys[event.key](); }
  });
  let grabbed = null;
  box.addEventListener("pointerdown", (event) => { grabbed = {x: event.clientX, from: view.from}; });
  window.addEventListener("pointerup", () => { grabbed = null; });
  box.addEventListener("pointermove", (event) => {
    if (grabbed) {
      const perPixel = length() / Math.max(box.getBoundingClientRect().width - LEFT, 1);
      move(grabbed.from - (event.clientX - grabbed.x) * perPixel, length());
    }
    const i = event.target.dataset && event.target.dataset.i;
    showTip(event, i === undefined || grabbed ? "" : view.spans[i]);
  });
  box.addEventListener("mouseleave", (event) => showTip(event, ""));
  window.addEventListener("resize", drawTimelines);
}

function drawCompared() {
  if (!data.compared.length) return;
  const rows = data.compared.map(([what, a, b]) => [esc(what), seconds(a), seconds(b), a ? (b / a).toFixed(2) : ""]);
  byId("compared").innerHTML = "<h2>Predicted and measured</h2><p>Seconds of a step by kind of op; an op is one entry of the schedule, such as the gather of a unit. A ratio above 1 is slower than predicted.</p>" +
    table(["kind of op", "predicted", "measured", "ratio"], rows, [1, 2, 3]);
}

function drawLayout() {
  const layout = data.layout;
  if (!layout) return;
  const strip = (cells) => {
    const size = Math.max(3, Math.min(12, Math.floor(260 / cells.length)));
    const rects = [...cells].map((cell, i) => `<rect x="${i * size}" width="${size - 1}" height="12" fill="var(${cell === "1" ? "--accent" : "--line"})"/>`);
    return `<svg style="width:${size * cells.length}px" height="12" role="img" aria-label="${esc(cells)}">${rects.join("")}</svg>`;
  };
  let before = null;
  const rows = layout.rows.map(([unit, leaf, what, spec, share, cells]) => {
    const title = unit === before ? "" : `<b>${esc(unit)}</b>`;
    before = unit;
    return [title, `<code>${esc(leaf)}</code>`, `<code>${esc(what)}</code>`, esc(spec), esc(share), strip(cells)];
  });
  const kept = Object.entries(layout.nbytes).map(([kind, nbytes]) => `${kind} ${bytes(nbytes)}`).join(", ");
  byId("layout").innerHTML = `<h2>Who holds what</h2><p>${esc(layout.num_params.toLocaleString("en"))} parameters on ${esc(layout.layout)}. At rest a rank holds: ` +
    `${esc(kept)} (optim is one value of optimizer state for each parameter). A cell is a rank, or a run of ranks: blue with some of the leaf. The spec is how the user places the leaf, ` +
    `such as along which axis a dimension is split; it is empty for leaves that the strategy alone places.</p>` +
    table(["unit", "leaf", "dtype and shape", "spec", "on a rank", `ranks 0 to ${layout.ranks - 1}`], rows, []);
}

function drawRanks() {
  if (!data.own_s.length) return;
  const ranks = data.own_s.reduce((most, [, row]) => Math.max(most, row.length), 0), sorted = (row) => [...row].sort((a, b) => a - b);
  const named = ranks <= 16
    ? [...Array(ranks).keys()].map((rank) => [`rank ${rank}`, (row) => row[rank]])
    : [["fastest", (row) => sorted(row)[0]], ["median", (row) => sorted(row)[row.length >> 1]], ["slowest", (row) => sorted(row)[row.length - 1]]];
  byId("ranks").innerHTML = "<h2>Ranks</h2><p>Seconds that a step takes each rank without waits for other ranks. A rank above the others is a straggler.</p>" +
    '<div class="box" id="own"></div>';
  const lines = named.map(([label, of], i) => ({
    label, colour: `hsl(${Math.round(i * 137.5) % 360} 60% 50%)`, points: data.own_s.map(([step, row]) => [step, of(row)]).filter((p) => p[1] !== undefined),
  }));
  chart("own", "own time", lines, seconds);
}

function drawEvents() {
  const starts = data.starts.map(([step, time], i) => [step, time, i ? `started again, to go on at step ${step}` : "started"]);
  const rows = [...starts, ...data.events].sort((a, b) => a[1] - b[1]);
  const notes = [];
  if (data.num_events > data.events.length) notes.push(`The newest ${data.events.length} of ${data.num_events} events are listed.`);
  if (data.num_marks > data.marks.length) notes.push(`Charts mark ${data.marks.length} of ${data.num_marks} starts and events.`);
  byId("events").innerHTML = `<h2>Starts, slow ranks and faults</h2><p>${notes.join(" ")}</p>` + (rows.length
    ? table(["step", "time", "event"], rows.map(([step, time, text]) => [step, when(time), esc(text)]), [0])
    : "<p>Nothing is recorded.</p>");
}

function drawEnvironment() {
  if (!data.starts.length) return;
  const rows = [];
  const add = (name, value) => {
    if (value !== null && typeof value === "object") {
      for (const [key, each] of Object.entries(value)) add(name ? `${name}.${key}` : key, each);
    } else rows.push([esc(name), `<code>${esc(value)}</code>`]);
  };
  add("", data.starts[data.starts.length - 1][2]);
  byId("environment").innerHTML = "<h2>Settings and environment</h2><p>Of the last start.</p>" + table(["", ""], rows, []);
}

const SECTIONS = {
  summary: drawSummary, values: drawValues, step: drawStep, compared: drawCompared, layout: drawLayout, ranks: drawRanks,
  events: drawEvents, environment: drawEnvironment,
};
for (const [id, draw] of Object.entries(SECTIONS)) {
  try {
    draw();
  } catch (error) { // the other sections are of use without this one
    byId(id).innerHTML = `<p>The section "${esc(id)}" could not be drawn from the log: ${esc(error)}</p>`;
  }
}
