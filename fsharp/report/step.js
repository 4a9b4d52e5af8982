"use strict";
// Draws timelines of steps from the values in the element "data". All text of the run goes through esc().

const data = JSON.parse(document.getElementById("data").textContent);
const byId = (id) => document.getElementById(id);
const esc = (text) => String(text).replace(/[&<>"']/g, (c) => `&#${c.charCodeAt(0)};`);

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
  const rough = high / most - low / most || 1;
  const power = 10 ** Math.floor(Math.log10(rough));
  const step = [1, 2, 5, 10].map((m) => m * power).find((each) => each >= rough);
  const first = Math.ceil(low / step - 1e-9), found = [];
  // If values differ in their last bits, first is so large that first + 1 may be first: i counts.
  for (let i = 0; (first + i) * step - high <= step * 1e-9; i++) found.push(Number(((first + i) * step).toPrecision(12)));
  return found;
}

// The timelines share one window of time, [view.from, view.to]: in seconds, or in positions of ops if nothing has times.
const view = {from: 0, to: 1, spans: []};
const LANE = {compute: 28}, OTHER = 22, CURVE = 64, LEFT = 92;
const clock = (time) => data.has_times ? seconds(time) : String(Math.round(time));

function unitColours() {
  const units = [];
  for (const timeline of Object.values(data.timelines)) {
    for (const span of timeline.spans) if (span[2] && !units.includes(span[2])) units.push(span[2]);
  }
  return (unit, phase) => {
    if (!unit) return "var(--soft)";
    const hue = 30 + Math.round(units.indexOf(unit) * 114.6) % 300; // not red, which is time that compute waits
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
  const lines = [`${bar.kind} ${bar.units.join(", ")}`.trim()];
  lines.push(`${name ? `${name}, ` : ""}${bar.phase}, stream ${bar.stream}, op ${bar.ops.join(", ")}`);
  lines.push(`${data.has_times ? `${seconds(bar.stop - bar.start)}, ` : ""}from ${clock(bar.start)} to ${clock(bar.stop)}`);
  if (bar.sent) lines.push(`sends ${bytes(bar.sent)}`);
  if (bar.memory.length) lines.push(`memory: ${bar.memory.join("; ")}`);
  return lines.join("\n");
}

function live(timeline, time) {
  const [, nbytes] = timeline.memory.reduce((found, each) => each[0] <= time ? each : found);
  return `${bytes(nbytes)} of the arena are live at ${clock(time)}`;
}

function title(timeline) {
  if (!data.has_times) return `${timeline.step_s} ops in order, ${bytes(timeline.spans.reduce((sum, span) => sum + span[7], 0))} sent`;
  return `${seconds(timeline.step_s)} a step, compute waits ${seconds(timeline.exposed_s)}, ` +
    `${(100 * timeline.overlap).toFixed(0)}% of the communication overlaps compute`;
}

function drawTimelines() {
  const box = byId("timeline"), width = Math.max(box.clientWidth, 320);
  view.width = box.clientWidth;
  const colour = view.colour, scale = (width - LEFT) / (view.to - view.from);
  const x = (second) => LEFT + (second - view.from) * scale;
  let svg = "", y = 4;
  const peak = Object.values(data.timelines).reduce((most, each) => Math.max(most, each.peak_nbytes), 1);
  view.spans = [];
  for (const [name, timeline] of Object.entries(data.timelines)) {
    const every = bars(timeline), length = timeline.step_s;
    const about = name ? `${name}: ${title(timeline)}` : title(timeline);
    for (const line of width < 640 ? about.split(/(?<=,) (?=\d+%)/) : [about]) {
      svg += `<text class="about" x="0" y="${y + 12}">${esc(line)}</text>`;
      y += 16;
    }
    y += 4;
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
    const level = (n) => y + CURVE - n / peak * (CURVE - 8);
    const points = [];
    timeline.memory.forEach(([second, nbytes], i) => {
      const until = i + 1 < timeline.memory.length ? timeline.memory[i + 1][0] : length;
      if (until < view.from || second > view.to) return;
      points.push([x(Math.max(second, view.from)), level(nbytes)], [x(Math.min(until, view.to)), level(nbytes)]);
    });
    if (points.length) {
      const line = points.map((p) => `${p[0].toFixed(1)} ${p[1].toFixed(1)}`).join("L");
      svg += `<path class="memory" data-name="${esc(name)}" d="M${points[0][0].toFixed(1)} ${y + CURVE}L${line}L${points[points.length - 1][0].toFixed(1)} ${y + CURVE}Z" ` +
        `fill="var(--accent)" fill-opacity="0.3" stroke="var(--accent)"/>`;
    }
    svg += `<text x="0" y="${y + 14}">memory</text><text x="0" y="${y + 28}">peak</text><text x="0" y="${y + 42}">${bytes(timeline.peak_nbytes)}</text>`;
    y += CURVE + 14;
  }
  const grid = ticks(view.from, view.to, Math.min(8, Math.floor((width - LEFT) / 80))).map((tick) => `<line class="axis" x1="${x(tick)}" x2="${x(tick)}" y1="0" y2="${y}"/>` +
    `<text x="${x(tick)}" y="${y + 12}" text-anchor="middle">${clock(tick)}</text>`).join("");
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
  const about = data.is_small ? "" : "<h2>A step</h2><p>A lane for each stream, and the live bytes of the arena. Units have colours, which are pale in the " +
    `forward. ${data.has_times ? "Red is time in which compute waits." : "The axis counts ops: each op has the same width, and ops that wait are red."} Point at a bar to read ` +
    "what it is. + and - zoom, and so does the wheel with Ctrl; drag and the arrow keys move; 0 shows the whole step.</p>";
  byId("step").innerHTML = about +
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
  box.addEventListener("wheel", (event) => { // without Ctrl it scrolls the page, on which the picture may be one of several
    if (!event.ctrlKey) return;
    event.preventDefault();
    zoom(event.deltaY < 0 ? 0.8 : 1.25, at(event));
  }, {passive: false});
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
    const {i, name} = event.target.dataset || {};
    const text = i !== undefined ? view.spans[i] : name !== undefined ? live(data.timelines[name], at(event)) : "";
    showTip(event, grabbed ? "" : text);
  });
  box.addEventListener("mouseleave", (event) => showTip(event, ""));
  new ResizeObserver(() => { if (box.clientWidth !== view.width) drawTimelines(); }).observe(box);
}

function drawSections(sections) {
  for (const [id, draw] of Object.entries(sections)) {
    try {
      draw();
    } catch (error) { // the other sections are of use without this one
      byId(id).innerHTML = `<p>The section "${esc(id)}" could not be drawn: ${esc(error)}</p>`;
    }
  }
}
