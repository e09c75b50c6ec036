# Copyright The searchrl Authors
# SPDX-License-Identifier: Apache-2.0
"""toolbox: each built-in tool, the checks of calls, and what is refused."""

import http.server
import json
import threading
import time

import pytest

import fakes
import tiny

from searchrl.agent import dialogue as dialogues
from searchrl.search.corpus import Corpus
from searchrl.experiment import toolsets
from searchrl.toolbox import sandbox
from searchrl.toolbox import toolbox
from searchrl.trajectory import (
    Action, Passage, SearchError, Tool, ToolCall, ToolResult, Turn)

SEARCH = dialogues.SEARCH


def made(*names, **options):
  return toolbox.make(names, options, SEARCH, lambda name, options: Tool(
      name, 'Another engine.', SEARCH.parameters, call=options['call']))


def bound(*names, corpus=None, result_tokens=60, **options):
  return toolbox.bind(
      fakes.Search(), made(*names, **options), corpus=corpus,
      tokenizer=fakes.TOKENIZER, result_tokens=result_tokens, seed=0)


def call(tool, turns=(), **arguments):
  turns = (*turns, Turn((1,), (0.,), Action(tool, (), arguments)))
  return ToolCall(tool, arguments, tiny.question(), turns=turns,
                  turn=len(turns) - 1)


def test_the_search_alone_stays_as_it_is():
  search = fakes.Search()
  assert toolbox.bind(search, (SEARCH,), corpus=None, tokenizer=None,
                      result_tokens=0, seed=0) is search


@pytest.mark.parametrize('expression, value', [
    ('1 + 2 * 3', '7'), ('(1989 - 1931) / 2', '29'), ('2^10', '1024'),
    ('1,989 + 1', '1990'), ('10 / 4', '2.5'), ('max(1, 200)', '200'),
    ('sqrt(2)', '1.41421356237'), ('1 + 1 =', '2'), ('0.1 + 0.2', '0.3'),
    ('-7 // 2', '-4')])
def test_an_expression_has_its_value(expression, value):
  calculate = bound('calculate').tools['calculate']
  assert calculate([call('calculate', expression=expression)]) == [
      ToolResult(value)]


@pytest.mark.parametrize('expression', [
    '1 / 0', 'a + 1', '__import__("os").system("ls")', '9**9**9**9', '(' * 300,
    '1 ' * 400, '"a" * 3', 'True', '', '[1, 2]', '().__class__', '1e308 * 10',
    'lambda: 1', '\x00', '10**5000', '3999999^3999999', '9^9999*9^9999',
    '*'.join(['9^3000'] * 60), '1<<9999<<9999', '(-7)^4000000',
    '"%0999999999d" % 1', "f'{1:0999999999d}'", 'round(7, -3999999)',
    'round(1e300, -99999999)', '1;2'])
def test_any_other_expression_is_a_wrong_call(expression):
  calculate = bound('calculate').tools['calculate']
  result, = calculate([call('calculate', expression=expression)])
  assert result.is_error and result.text.startswith('Error: ')


def test_large_numbers_are_refused_before_they_are_computed():
  """With them, all threads of the process would wait for minutes."""
  calculate = bound('calculate').tools['calculate']
  start = time.process_time()
  results = calculate([call('calculate', expression=text) for text in (
      '+'.join(['3999999^3999999'] * 30), '2^9000*2^990', 'round(7.25, 1)')])
  assert time.process_time() - start < 5
  assert results[0].text == ('Error: this cannot be computed: ValueError: a '
                             'number is too large.')
  assert [r.text for r in results[1:]] == [str(2**9990), '7.2']


def test_arguments_are_checked_by_the_schema():
  seen = []

  def echo(calls):
    seen.extend(one.arguments for one in calls)
    return [ToolResult(one.arguments['a']) for one in calls]

  tool = Tool('echo', 'Echoes.', {
      'type': 'object', 'required': ['a'], 'additionalProperties': False,
      'properties': {'a': {'type': 'string'}}}, echo)
  checked = toolbox.checked(tool, echo)
  results = checked([call('echo', a='x'), call('echo', a=3), call('echo'),
                     call('echo', a='y', b=1), call('echo', a='z')])
  assert [r.is_error for r in results] == [False, True, True, True, False]
  assert [r.text for r in results if not r.is_error] == ['x', 'z']
  assert results[1].text == "Error: wrong arguments: 3 is not of type 'string'."
  assert seen == [{'a': 'x'}, {'a': 'z'}]


def with_schema(*, schema):
  return Tool('echo', 'Echoes.', schema, lambda calls: [
      ToolResult('x') for _ in calls])


def with_a(schema, **others):
  return {'type': 'object', 'properties': {'a': schema}} | others


DRAFT7 = 'http://json-schema.org/draft-07/schema#'
PAIR = {'type': 'array', 'items': [{'type': 'string'}, {'type': 'integer'}]}
TREE = {'$defs': {'tree': {'type': 'array', 'items': {'$ref': '#/$defs/tree'}}}}


@pytest.mark.parametrize('schema, good, bad', [
    (with_a(PAIR, **{'$schema': DRAFT7}), ['x', 1], ['x', 'y']),
    (with_a({'$ref': '#/$defs/tree'}, **TREE), [[], [[]]], [[], [3]]),
    (with_a({'$ref': 'x#/$defs/tree'}, **TREE, **{'$id': 'http://a.b/x'}),
     [], 3),
    (with_a({'$ref': DRAFT7}), {'type': 'null'}, {'type': 3}),
    (with_a({'enum': [{'$ref': '#/no'}]}), {'$ref': '#/no'}, 3),
    (with_a({'pattern': '^x+$'}, **{'$schema': 'http://a.b/mine'}), 'xx', 'y')])
def test_a_schema_is_of_the_draft_that_it_declares(schema, good, bad):
  tool, = made('toolbox_test:with_schema', **{
      'toolbox_test:with_schema': {'schema': schema}})
  results = toolbox.checked(tool, tool.call)([
      call('echo', a=good), call('echo', a=bad)])
  assert [r.is_error for r in results] == [False, True]


@pytest.mark.parametrize('schema, message', [
    (with_a(PAIR), "are not: .* is not of type 'object', 'boolean'"),
    (with_a({'$ref': '#/$defs/no'}), "refer to '#/\\$defs/no', which is not"),
    (with_a({'$ref': '#no'}), "refer to '#no', which is not in them"),
    (with_a({'anyOf': [{'items': {'$ref': 'http://a.b/c.json'}}]}),
     "refer to 'http://a.b/c.json', which is not in them"),
    (with_a({'$ref': '#/no/b'}, no={'b': {'$dynamicRef': '#gone'}}),
     "refer to '#gone', which is not in them"),
    (with_a({'pattern': r'^\p{L}$'}), "are not: '.*' is not a 'regex'"),
    (with_a({'patternProperties': {'[': {}}},
            **{'$schema': 'http://json-schema.org/draft-04/schema#'}),
     "have the pattern '\\[', which Python cannot compile"),
    (with_a({}, **{'$schema': 3}), "are not: 3 is not of type 'string'"),
    ([], 'are not: ')])
def test_a_schema_that_no_call_can_be_checked_by_is_refused(schema, message):
  with pytest.raises(ValueError, match="the parameters of tool 'echo' must be "
                     f'a JSON schema, but {message}.*leave the tool out, if a '
                     'server gives it, by the option names'):
    made('toolbox_test:with_schema', **{
        'toolbox_test:with_schema': {'schema': schema}})


def test_a_wrong_number_of_results_is_never_read_as_right():
  tool = Tool('echo', 'Echoes.', {'required': ['a']})
  checked = toolbox.checked(tool, lambda calls: [ToolResult('x')] * 3)
  results = checked([call('echo', a=1), call('echo', a=2), call('echo')])
  assert results == [SearchError('bad_response', '3 results for 2 calls')] * 3


DOCUMENT = [f'word{chr(97 + n)} ' * 5 for n in range(6)]
CORPUS = Corpus(tuple(
    [Passage('x', 'Other', 'before')] +
    [Passage(f'd{n}', 'Long one', text.strip())
     for n, text in enumerate(DOCUMENT)] + [Passage('y', 'Last', 'after that')]))
TEXT = ' '.join(text.strip() for text in DOCUMENT)


def read_all(reader, id_):
  """The pages of a document, read one after the other."""
  turns, pages = (), []
  while True:
    one = call('open', turns, id=id_)
    result, = reader([one])
    if result.is_error:
      return pages, result.text
    pages.append(result)
    turns = (*turns, Turn((1,), (0.,), Action('open', (), {'id': id_}), (2,),
                          result.passages))


def test_a_document_is_read_in_windows():
  reader = bound('open', corpus=CORPUS).tools['open']
  for id_ in ('d0', 'd4', '[d2]'):  # any passage leads to its document
    pages, end = read_all(reader, id_)
    texts = [page.text.split('\n', 1)[1] for page in pages]
    assert ' '.join(texts) == TEXT and len(pages) > 2
    assert all(len(fakes.TOKENIZER.encode(page.text)) <= 60 for page in pages)
    assert pages[1].text.startswith(f'Long one (page 2 of {len(pages)})\n')
    assert pages[0].passages == (Passage('d0', 'Long one', texts[0]),)
    assert end == (f'Error: the document has {len(pages)} pages, and page '
                   f'{len(pages) + 1} is none of them.')


def test_equal_pages_are_read_one_after_the_other():
  text = ' '.join(['word'] * 60 + ['end'])
  reader = bound('open', corpus=Corpus((Passage('a', '', text),))).tools['open']
  pages, _ = read_all(reader, 'a')
  texts = [page.text.split('\n', 1)[1] for page in pages]
  assert ' '.join(texts) == text and len({*texts}) < len(texts) > 3
  for given, next_page in (({'page': 2}, 3), ({'find': 'word'}, 2),
                           ({'page': 3, 'find': 'word'}, 4)):
    said = Turn((1,), (0.,), Action('open', (), {'id': 'a', **given}), (2,),
                pages[given.get('page', 1) - 1].passages)
    assert reader([call('open', (said,), id='a')]) == [pages[next_page - 1]]


@pytest.mark.parametrize('text', [
    'a b ' + '東京は日本の首都である。' * 20 + '秘密の答えは金閣寺。 wordb end',
    'see https://example.org/' + 'x9é' * 200 + '/wordb', 'ab' * 3000])
def test_a_text_without_spaces_is_read_in_windows(text):
  """Its pages have whole characters, and what is on two of them is found."""
  corpus = Corpus((Passage('a', 'T', text),))
  reader = bound('open', corpus=corpus).tools['open']
  pages, _ = read_all(reader, 'a')
  texts = [page.text.split('\n', 1)[1] for page in pages]
  assert ''.join(texts).replace(' ', '') == text.replace(' ', '')
  assert all(len(fakes.TOKENIZER.encode(page.text)) <= 60 for page in pages)
  assert len(texts) > 10
  for page, after in zip(texts[1:-2], texts[2:]):  # no character more fits
    assert len(fakes.TOKENIZER.encode(f' {page}{after[0]}')) > 60 - 24
  last = len(texts) - 2
  result, = reader([call('open', id='a', page=last,
                         find=texts[last - 1][-8:] + texts[last][:8])])
  assert result == pages[last - 1]


def test_a_character_of_more_tokens_than_a_page_is_not_divided():
  reader = bound('open', corpus=Corpus((Passage('a', 'T', 'ab東京c'),)),
                 open=dict(window_tokens=2)).tools['open']
  pages, _ = read_all(reader, 'a')
  assert [page.text.split('\n', 1)[1] for page in pages] == [
      'ab', '東', '京', 'c']


def test_a_page_may_be_a_float_without_a_fraction():
  """The schema's integers include it, and a JSON library may write it."""
  reader = bound('open', corpus=CORPUS).tools['open']
  assert reader([call('open', id='d0', page=2.0)]) == reader(
      [call('open', id='d0', page=2)])


def test_a_text_is_found_in_a_document():
  reader = bound('open', corpus=CORPUS).tools['open']
  result, = reader([call('open', id='d0', find='WordE')])
  page = int(result.text.split('page ')[1].split()[0])
  again, = reader([call('open', id='d0', page=page)])
  before, = reader([call('open', id='d0', page=page - 1)])
  assert result == again and 'worde' in result.text
  assert 'worde' not in before.text
  missing, = reader([call('open', id='d0', find='nowhere')])
  assert missing == ToolResult("Error: 'nowhere' is not in it.", is_error=True)


@pytest.mark.parametrize('find', ['worda  WORDA\nwordb', 'wordb wordb wordc'])
def test_a_text_may_go_on_on_the_next_page(find):
  reader = bound(
      'open', corpus=CORPUS, open=dict(window_tokens=6)).tools['open']
  result, = reader([call('open', id='d0', find=find)])
  pages, _ = read_all(reader, 'd0')
  texts = [page.text.split('\n', 1)[1] for page in pages]
  page = int(result.text.split('page ')[1].split()[0])
  wanted = ' '.join(find.lower().split())
  assert wanted not in texts[page - 1]  # its end is on another page
  assert wanted in ' '.join(texts[page - 1:])
  assert wanted not in ' '.join(texts[page:])
  later, = reader([call('open', id='d0', find=find, page=page + 1)])
  assert later.is_error


def test_the_title_of_a_passage_that_was_shown_opens_it():
  reader = bound('open', corpus=CORPUS).tools['open']
  shown = Turn((1,), (0.,), Action('search', ('q',)), (2,), (CORPUS[7],))
  result, = reader([call('open', (shown,), id='"last"')])
  assert result.text == 'Last (page 1 of 1)\nafter that'
  result, = reader([call('open', id='Last')])
  assert result.is_error and result.text == "Error: there is no passage 'Last'."


def test_ids_that_are_positions_need_no_table():
  corpus = Corpus(tuple(Passage(str(n), '', f't{n}') for n in range(12)))
  reader = bound('open', corpus=corpus).tools['open']
  results = reader([call('open', id=id_) for id_ in (
      '0', '11', '12', '١', '-1', '00', '000000000000999')])
  assert [r.is_error for r in results] == [False, False] + [True] * 5
  assert results[1].text.endswith('t11')


def test_open_needs_a_corpus():
  with pytest.raises(ValueError, match='the tool open needs a corpus'):
    bound('open', corpus=None)


@pytest.fixture
def sandbox_server():
  """A server with SandboxFusion's interface, which runs nothing."""
  replies = []

  class Handler(http.server.BaseHTTPRequestHandler):
    def do_POST(self):  # pylint: disable=invalid-name
      body = json.loads(self.rfile.read(int(self.headers['Content-Length'])))
      status, reply = replies[0](body) if replies else (503, {})
      self.send_response(status)
      self.end_headers()
      self.wfile.write(json.dumps(reply).encode())

    def log_message(self, *_):
      """Prints nothing."""

  server = http.server.ThreadingHTTPServer(('127.0.0.1', 0), Handler)
  threading.Thread(target=server.serve_forever, daemon=True).start()
  yield f'http://127.0.0.1:{server.server_port}/run_code', replies
  server.shutdown()


def test_a_program_runs_on_the_server(sandbox_server):
  url, replies = sandbox_server

  def reply(body):
    assert body['language'] == 'python' and body['run_timeout'] == 5.0
    if 'raise' in body['code']:
      return 200, {'status': 'Failed', 'run_result': {
          'status': 'Finished', 'stdout': 'a\n', 'stderr': 'ValueError: b'}}
    if 'while' in body['code']:
      return 200, {'status': 'Failed', 'run_result': {
          'status': 'TimeLimitExceeded', 'stdout': '', 'stderr': ''}}
    if 'break' in body['code']:
      return 200, {'status': 'SandboxError', 'run_result': None}
    return 200, {'status': 'Success', 'run_result': {
        'status': 'Finished', 'stdout': '4\n', 'stderr': 'a warning'}}

  replies.append(reply)
  python = bound('python', python=dict(
      urls=(url,), tries=1)).tools['python']
  results = python([call('python', code=code) for code in (
      'print(4)', 'raise', 'while 1', 'break')])
  assert results[:3] == [
      ToolResult('4'), ToolResult('a\nError: ValueError: b', is_error=True),
      ToolResult('Error: the program ran too long', is_error=True)]
  assert results[3].kind == 'bad_response'


def test_a_sandbox_that_is_down_is_no_wrong_call(sandbox_server):
  url, replies = sandbox_server
  tool = sandbox.make(urls=(url,), tries=1, pause_secs=30, wiring=dict(
      sleep=lambda secs: replies.append(lambda body: (200, {
          'status': 'Success', 'run_result': {'stdout': '1'}})),
      warn=lambda text: None))
  result, = tool.call([call('python', code='print(1)')])
  assert isinstance(result, SearchError) and result.kind == 'unavailable'
  tool.call.wait()  # returns once the server answers
  assert tool.call([call('python', code='print(1)')]) == [ToolResult('1')]
  assert tool.call.pop()['tool/python/failed_calls'] == 2


def test_a_name_of_your_own_has_a_kind():
  tools = made('search', 'sum', 'search_web', sum=dict(tool='calculate'),
               search_web=dict(call=fakes.Search()))
  assert [tool.name for tool in tools] == ['search', 'sum', 'search_web']
  functions = toolbox.bind(fakes.Search(), tools, corpus=None, tokenizer=None,
                           result_tokens=9, seed=0)
  assert {*functions.tools} == {'search', 'sum', 'search_web'}
  result, = functions.tools['sum']([call('sum', expression='1+1')])
  assert result == ToolResult('2')


def web():
  """A tool whose name is that of an engine."""
  return Tool('search_web', 'Searches the web.', {}, list)


@pytest.mark.parametrize('names, options, message', [
    (('serch',), {}, "tools must each be search, open, calculate, python, mcp, "
     "or 'module:function' of your own, but one is 'serch'."),
    (('no.such:tool',), {}, "must be 'module:function', but 'no.such:tool' "),
    (('open', 'open'), {}, "different names, but 'open' occurs twice"),
    (('open',), {'calculate': {}},
     "tool_options must be of names in tools, which are open, but has "
     "'calculate'"),
    (('open',), {'open': {'window': 3}},
     'tool_options.open.window is no option of '),
    (('open',), {'open': {'window_tokens': -3}},
     'tool_options.open.window_tokens must be at least 0, but is -3'),
    (('answer',), {'answer': {'tool': 'calculate'}},
     "no tag of the protocol, but has 'answer'"),
    (('a b',), {'a b': {'tool': 'calculate'}}, "but has 'a b'"),
    (('mcp',), {}, 'command must be a tuple of words, or be left out if url is '
     "given, but they are \\(\\) and ''"),
    (('mcp',), {'mcp': {'command': ('no-such-program',)}},
     'command must be an MCP server that answers within call_secs=30, but '
     'no-such-program failed: FileNotFoundError'),
    (('python',), {'python': {'run_secs': 0}},
     'tool_options.python.run_secs must be above 0, but is 0'),
    (('python',), {'python': {'run_secs': 20, 'try_secs': 15}},
     'run_secs must be below try_secs and deadline_secs, .* but is 20, and '
     'they are 15 and 30. Raise them'),
    (('python',), {'python': {'run_secs': 30}}, 'and they are 35 and 30'),
    (('json:loads',), {}, 'tool_options.json:loads.s must be given'),
    (('platform:node',), {}, 'functions that return a Tool, or several, but '
     'platform:node returned'),
    (('toolbox_test:web',), {}, "toolbox_test:web returned a tool 'search_web'. "
     "Rename it; or, .* name the engine in tool_options.search_web.engine"),
])
def test_what_cannot_be_a_tool_is_refused(names, options, message):
  with pytest.raises(ValueError, match=message):
    made(*names, **options)


def test_keys_of_an_option_that_are_no_texts_are_refused():
  options = {'calculate': {'names': [{'a': {1: 'one'}}]}}
  with pytest.raises(ValueError, match='^tool_options.calculate.names.a must '
                     "have texts as keys, .* has 1. Write '1'"):
    toolsets.listed({'tools': ('calculate',), 'tool_options': options})
