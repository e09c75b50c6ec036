// Shows what the page carries. Texts of models and engines become text nodes,
// never markup: there is no innerHTML here.
'use strict';

const ROW = 58;  // pixels of a row of the list, as in style.css
const $ = id => document.getElementById(id);
const make = (tag, className, text) => {
  const node = document.createElement(tag);
  if (className) node.className = className;
  if (text !== undefined) node.textContent = text;
  return node;
};
const said = value => value === null || value === undefined ? '–'
    : typeof value === 'number' ? String(+value.toPrecision(4)) : String(value);

const ratioText = value => typeof value === 'number' && value !== 1
    && Math.abs(value - 1) < 1e-3
    ? `1 ${value < 1 ? '−' : '+'} ${said(Math.abs(value - 1))}` : said(value);

// ---- light and dark

const root = document.documentElement;
root.classList.toggle('dark', matchMedia('(prefers-color-scheme: dark)').matches);
$('theme').addEventListener('click', () => root.classList.toggle('dark'));

// ---- the data

async function unpacked(element) {
  const bytes = Uint8Array.from(atob(element.textContent), c => c.charCodeAt(0));
  const stream = new Blob([bytes]).stream()
      .pipeThrough(new DecompressionStream('gzip'));
  return new Response(stream).json();
}

const chunkElements = [...document.querySelectorAll('script.chunk')];
const chunkSize = Number($('index').dataset.chunk);
const chunks = new Map();  // number -> promise of bodies

function body(id) {
  const number = Math.floor(id / chunkSize);
  if (!chunks.has(number)) chunks.set(number, unpacked(chunkElements[number]));
  return chunks.get(number).then(bodies => bodies[id % chunkSize]);
}

const textOf = segments => segments.map(
    s => s.texts.join('') + (s.passages || []).map(
        p => `\n${p.title} ${p.text}`).join('')).join('\n').toLowerCase();

// ---- filters

let heads = [], shown = [], matching = new Set(), selected = -1, texts = null, reading = null;
const form = $('filters');

function fill(name, values) {
  const select = form.elements[name];
  select.append(new Option('all', ''));
  for (const value of values) select.append(new Option(value, value));
  if (values.length < 2) select.parentElement.hidden = true;
}

const distinct = of => [...new Set(heads.map(of))].map(String);

function fillFilters() {
  for (const name of ['run', 'where', 'set', 'stop'])
    fill(name, distinct(head => head[name]));
  fill('searches', distinct(head => head.searches).sort((a, b) => a - b));
  const parts = [...new Set(heads.flatMap(head => Object.keys(head.parts)))];
  const select = form.elements.part;
  for (const name of ['score', ...parts]) select.append(new Option(name, name));
}

const measure = (head, part) => part === 'score' ? head.score : head.parts[part];

function passes(head, wanted, text) {
  for (const name of ['run', 'where', 'set', 'stop', 'searches'])
    if (wanted[name] && String(head[name]) !== wanted[name]) return false;
  if (wanted.low !== '' || wanted.high !== '') {
    const value = measure(head, wanted.part);
    if (typeof value !== 'number') return false;
    if (wanted.low !== '' && value < Number(wanted.low)) return false;
    if (wanted.high !== '' && value > Number(wanted.high)) return false;
  }
  if (!text) return true;
  return [head.question, head.answer ?? '', ...head.golds]
      .some(one => one.toLowerCase().includes(text))
      || (texts !== null && texts[head.id].includes(text));
}

async function readTexts() {
  const found = [];
  for (let id = 0; id < heads.length; id++) found.push(textOf(await body(id)));
  texts = found;
  refresh();
}

function refresh() {
  const wanted = Object.fromEntries(new FormData(form));
  const text = wanted.text.trim().toLowerCase();
  if (text && !reading) reading = readTexts();
  matching = new Set(heads.filter(head => passes(head, wanted, text)));
  // The chosen one stays in the list, so that the list and the text agree.
  shown = heads.filter(head => matching.has(head) || head.id === selected);
  $('count').textContent = `${matching.size.toLocaleString('en')} of ${
      heads.length.toLocaleString('en')}`
      + (text && texts === null ? '; reading the conversations …' : '');
  rows.style.height = `${shown.length * ROW}px`;
  list.scrollTop = Math.max(0, ROW * (shown.findIndex(
      head => head.id === selected) - 1));
  draw();
  remember();
}

// ---- the list: only the rows in sight are in the document

const list = $('list'), rows = make('div', 'rows');

function draw() {
  const first = Math.max(0, Math.floor(list.scrollTop / ROW) - 5);
  const last = Math.min(shown.length,
      Math.ceil((list.scrollTop + list.clientHeight) / ROW) + 5);
  rows.replaceChildren(...shown.slice(first, last).map(
      (head, n) => row(head, first + n)));
}

function row(head, at) {
  const node = make('div', matching.has(head) ? 'row' : 'row outside');
  node.style.top = `${at * ROW}px`;
  node.id = `row-${head.id}`;
  node.setAttribute('role', 'option');
  node.setAttribute('aria-selected', head.id === selected);
  const question = make('div', '', head.question);
  question.dir = 'auto';
  const line = make('div', 'muted');
  line.append(make('b', '', said(head.score)),
      ` · ${head.answer ?? 'no answer'} · ${head.searches} searches · ${
          head.run}, ${head.where}`);
  node.append(question, line);
  node.addEventListener('click', () => choose(head.id));
  return node;
}

function step(by) {
  if (!shown.length) return;
  const at = shown.findIndex(head => head.id === selected);
  const next = Math.min(shown.length - 1, Math.max(0, at < 0 ? 0 : at + by));
  if (next * ROW < list.scrollTop) list.scrollTop = next * ROW;
  if ((next + 1) * ROW > list.scrollTop + list.clientHeight)
    list.scrollTop = (next + 1) * ROW - list.clientHeight;
  choose(shown[next].id);
}

// ---- one trajectory

const detail = $('detail');
const COLOURS = ['role', 'logprobs', 'ratios', 'advantages'];
const NAMES = {role: 'who wrote it', logprobs: 'log-probability',
               ratios: 'ratio', advantages: 'advantage'};
let colour = 'role', tokens = [], here = -1, inspector;

async function choose(id) {
  selected = id;
  draw();
  list.setAttribute('aria-activedescendant', `row-${id}`);
  const segments = await body(id);
  if (selected !== id) return;
  show(heads[id], segments);
  document.querySelector('.browser').classList.add('reading');
  if ($('back').offsetParent) detail.scrollIntoView();  // a phone: no list beside
  remember();
}

function show(head, segments) {
  tokens = [];
  here = -1;
  const title = make('h3', '', head.question);
  title.dir = 'auto';
  const conversation = make('div', 'conversation');
  conversation.tabIndex = 0;
  conversation.setAttribute('aria-label',
      'Conversation; arrow keys walk through its tokens');
  let position = 0;
  segments.forEach((segment, n) => {
    conversation.append(segmentNode(segment, n, position));
    position += segment.texts.length;
  });
  conversation.addEventListener('mouseover', event => {
    if (event.target.dataset.n) inspect(Number(event.target.dataset.n));
  });
  conversation.addEventListener('click', event => {
    if (event.target.dataset.n) inspect(Number(event.target.dataset.n));
  });
  conversation.addEventListener('keydown', event => {
    const by = {ArrowRight: 1, ArrowLeft: -1}[event.key];
    if (by) {
      inspect(Math.min(tokens.length - 1, Math.max(0, here + by)), true);
      event.preventDefault();
    }
  });
  inspector = make('div', 'inspector');
  inspector.id = 'inspector';
  inspector.append(make('span', 'muted', 'Point at a token for its numbers.'));
  detail.replaceChildren(tools(), title, facts(head), conversation, inspector);
  paint();
}

function tools() {
  const bar = make('div', 'tools');
  const back = make('button', '', '← all');
  back.id = 'back';
  back.type = 'button';
  back.addEventListener('click', () =>
      document.querySelector('.browser').classList.remove('reading'));
  const label = make('label', 'muted', 'Colour: ');
  const select = make('select');
  select.id = 'colour';
  for (const name of COLOURS) select.append(new Option(NAMES[name], name));
  select.value = colour;
  select.addEventListener('change', () => { colour = select.value; paint(); });
  label.append(select);
  const key = make('span', 'key');
  key.id = 'key';
  bar.append(back, label, key);
  return bar;
}

function facts(head) {
  const line = make('div', 'facts');
  const add = (name, value) => {
    const one = make('span', '', `${name} `);
    one.append(make('b', '', value));
    line.append(one);
  };
  add('answer', head.answer ?? 'none');
  add('golds', head.golds.join(' | ') || 'none');
  add('score', said(head.score));
  for (const [name, value] of Object.entries(head.parts)) add(name, said(value));
  add('ended by', head.stop);
  add('searches', said(head.searches));
  if (head.hops) add('hops', said(head.hops));
  add('in', `${head.run}, ${head.where}, ${head.set}`);
  return line;
}

const WHO = {prompt: 'prompt', policy: 'policy', observation: 'observation'};

function segmentNode(segment, number, position) {
  const trained = segment.role === 'policy'
      ? segment.trained === null ? '' : segment.trained
          ? ', in the loss' : ', not in the loss' : ', not in the loss';
  const node = make('div', `segment ${segment.role}`
      + (segment.trained === false ? ' untrained' : ''));
  node.append(make('div', 'who', WHO[segment.role]
      + (segment.action ? `: ${segment.action}` : '') + trained));
  const text = make('div', 'tokens');
  segment.texts.forEach((one, k) => {
    const token = make('span', 't', one);
    token.dataset.n = tokens.length;
    tokens.push({token, segment, k, position: position + k});
    text.append(token);
  });
  node.append(text);
  if (segment.passages && segment.passages.length)
    node.append(passages(segment.passages));
  return node;
}

function passages(found) {
  const node = make('ol', 'passages');
  for (const one of found) {
    const item = make('li', one.gold ? 'gold' : '');
    const title = make('b', '', one.title);
    item.append(title, ' ');
    if (one.gold) item.append(make('span', 'tag', 'has a gold'), ' ');
    item.append(make('span', 'muted', `score ${said(one.score)}`),
        make('div', '', one.text));
    node.append(item);
  }
  return node;
}

function inspect(n, scroll) {
  if (here >= 0) tokens[here].token.classList.remove('here');
  here = n;
  const {token, segment, k, position} = tokens[n];
  token.classList.add('here');
  if (scroll) token.scrollIntoView({block: 'nearest'});
  const add = (name, value) => {
    const one = make('span', '', `${name} `);
    one.dataset.name = name;
    one.append(make('b', '', value));
    inspector.append(one);
  };
  inspector.replaceChildren(make('code', '', JSON.stringify(token.textContent)));
  add('token', said(position));
  add('by', WHO[segment.role]);
  const logprob = segment.logprobs?.[k];
  if (logprob !== undefined) {
    add('log-prob', said(logprob));
    add('prob', said(typeof logprob === 'number' ? Math.exp(logprob) : logprob));
  }
  if (segment.ratios) add('ratio', ratioText(segment.ratios[k]));
  if (segment.advantages) add('advantage', said(segment.advantages[k]));
  add('in the loss', segment.trained === null ? 'not noted'
      : segment.trained ? 'yes' : 'no');
}

// How far a number is from that of nothing to say, with a sign.
const FAR = {logprobs: value => value, ratios: Math.log, advantages: value => value};

// The largest distance in a conversation has the full colour: in the first
// update all ratios are close to 1, and still differ.
function paint() {
  const far = tokens.map(({segment, k}) => {
    const value = segment[colour]?.[k];
    return typeof value === 'number' ? FAR[colour](value) : null;
  });
  const most = Math.max(0, ...far.map(x => Number.isFinite(x) ? Math.abs(x) : 0));
  tokens.forEach(({token}, n) => {
    const number = far[n] !== null;
    token.classList.toggle('up', number && far[n] > 0);
    token.classList.toggle('down', number && far[n] <= 0);
    if (number)
      token.style.setProperty('--a', (Math.abs(far[n]) / (most || 1)).toFixed(2));
  });
  legend(most, far.some(x => x !== null));
}

function legend(most, any) {
  const key = $('key');
  const add = (name, style, text) => {
    const sample = make('i', name), one = make('span', '', text);
    if (style) sample.style.background = `var(${style})`;
    one.prepend(sample);
    key.append(one);
  };
  key.replaceChildren();
  if (colour === 'role') {
    for (const name of ['policy', 'observation', 'prompt'])
      add('', `--${name}`, WHO[name]);
    key.append(make('span', '', 'dotted line: not in the loss'));
  } else if (!any) {
    key.append(make('span', '', `no ${NAMES[colour]} is recorded here`));
  } else if (!most) {
    key.append(make('span', '', colour === 'ratios'
        ? 'all are 1: the learner is what sampled' : 'all are 0'));
  } else if (colour === 'logprobs') {
    add('one', '', `0 to ${said(-most)} nats`);
  } else if (colour === 'ratios') {
    add('scale', '', `below 1, above 1; full colour: 1 ± ${said(Math.expm1(most))}`);
  } else {
    add('scale', '', `below 0, above 0; full colour: ± ${said(most)}`);
  }
}

// ---- the numbers of the curves

for (const figure of document.querySelectorAll('.curve')) {
  const lines = JSON.parse(figure.dataset.lines);
  const steps = [...new Set(lines.flatMap(
      line => line.points.map(point => point[2])))];
  const places = new Map(lines.flatMap(
      line => line.points.map(point => [point[2], point[0]])));
  const leave = () => figure.querySelectorAll('.tip, .mark').forEach(
      node => node.remove());
  figure.addEventListener('pointermove', event => {
    leave();
    const svg = figure.querySelector('svg');
    const box = svg.getBoundingClientRect(), out = figure.getBoundingClientRect();
    const x = (event.clientX - box.left) / box.width;
    const near = steps.reduce((one, other) => Math.abs(places.get(other) - x)
        < Math.abs(places.get(one) - x) ? other : one);
    const tip = make('div', 'tip', `step ${near}`);
    for (const {name, points} of lines) {
      const point = points.find(one => one[2] === near);
      if (!point) continue;
      tip.append(make('div', '', (lines.length > 1 ? `${name}: ` : '')
          + said(point[3]) + (point[4] ? ` ± ${said(point[4])}` : '')));
      const mark = make('div', 'mark');
      mark.style.left = `${box.left - out.left - figure.clientLeft + point[0] * box.width}px`;
      mark.style.top = `${box.top - out.top - figure.clientTop + point[1] * box.height}px`;
      figure.append(mark);
    }
    tip.style[x < 0.5 ? 'right' : 'left'] = '.5rem';
    figure.append(tip);
  });
  figure.addEventListener('pointerleave', leave);
}

// ---- keys, and the address, which finds the same view again

document.addEventListener('keydown', event => {
  const typing = /^(INPUT|SELECT|TEXTAREA)$/.test(event.target.tagName);
  if (event.key === 'Escape' && typing) event.target.blur();
  if (typing || event.ctrlKey || event.metaKey || event.altKey) return;
  const inList = event.target === list;
  if (event.key === 'j' || (inList && event.key === 'ArrowDown')) step(1);
  else if (event.key === 'k' || (inList && event.key === 'ArrowUp')) step(-1);
  else if (event.key === '/') form.elements.text.focus();
  else if (event.key === 'c' && tokens.length) {
    colour = COLOURS[(COLOURS.indexOf(colour) + 1) % COLOURS.length];
    $('colour').value = colour;
    paint();
  } else if (['ArrowRight', 'ArrowLeft'].includes(event.key) && tokens.length
             && !event.defaultPrevented) {
    inspect(Math.min(tokens.length - 1, Math.max(0,
        here + (event.key === 'ArrowRight' ? 1 : -1))), true);
  } else return;
  event.preventDefault();
});

function remember() {
  const state = new URLSearchParams();
  for (const [name, value] of new FormData(form))
    if (value && !(name === 'part' && value === 'score')) state.set(name, value);
  if (selected >= 0) state.set('id', selected);
  const text = String(state);
  history.replaceState(null, '', text ? `#view?${text}` : location.pathname
      + location.search + (location.hash.startsWith('#view') ? '' : location.hash));
}

function recall() {
  if (!location.hash.startsWith('#view?')) return -1;
  const state = new URLSearchParams(location.hash.slice(6));
  for (const [name, value] of state)
    if (form.elements[name]) form.elements[name].value = value;
  const id = state.has('id') ? Number(state.get('id')) : -1;
  return Number.isInteger(id) && id >= 0 && id < heads.length ? id : -1;
}

async function start() {
  if (!form) return;
  if (typeof DecompressionStream === 'undefined') {
    $('count').textContent = 'This browser is too old to unpack the trajectories.';
    return;
  }
  heads = await unpacked($('index'));
  list.append(rows);
  fillFilters();
  const id = recall();
  refresh();
  if (id >= 0) await choose(id);
  list.addEventListener('scroll', draw, {passive: true});
  addEventListener('resize', draw);
  form.addEventListener('input', refresh);
  form.addEventListener('change', refresh);  // all that some send of a choice
  form.addEventListener('reset', () => setTimeout(refresh));
  form.addEventListener('submit', event => event.preventDefault());
  root.dataset.ready = 'yes';
}

start();
