# Copyright The searchrl Authors
# SPDX-License-Identifier: Apache-2.0
"""prepare_data: small files of the published schemas, whole and damaged."""

import copy
import gzip
import hashlib
import json
import pathlib

from configs import prepare_data as config_lib
import fsspec
from fsspec.implementations import memory
import huggingface_hub
import pytest

import published
from searchrl.data import datasets
from searchrl.data import questions as questions_lib
from searchrl.papers import prepare_data

SETS = ('nq', 'triviaqa', 'popqa', 'hotpotqa', '2wikimultihopqa', 'musique',
        'bamboogle')


@pytest.fixture
def source(tmp_path):
  folder = tmp_path / 'source'
  published.write_flashrag(folder)
  published.write_study(folder)
  return folder


def run(source, workdir, *, text='', **changes):
  config = config_lib.get_config(text)
  config.update(dict(source=str(source), any_rows=True) | changes)
  prepare_data.run(config, str(workdir))
  return workdir


def digest(data):
  return hashlib.sha256(data).hexdigest()


def test_the_table_has_the_published_numbers():
  def rows(name):
    return sum(entry.get('draw', entry['rows']) for entry in
               prepare_data.TABLE['questions'][name].values()
               if isinstance(entry, dict))
  assert [rows(name) for name in ('train', 'test', 'study_512')] == [
      169_615, 51_713, 512]
  for names in prepare_data.TABLE['papers'].values():
    assert {*names} <= {*prepare_data.names()}


def test_every_paper_has_its_files(source, tmp_path, capsys):
  folder = run(source, tmp_path / 'data')
  made = {file.stem: len(file.read_text().splitlines())
          for file in folder.glob('*.jsonl')}
  assert made == {'train': 10, 'train_nq': 6, 'test': 15, 'asqa_train': 2,
                  'asqa': 2, 'eli5': 2, 'gpqa': 3, 'simpleqa': 9,
                  'study_512': 3 + 9 + 2, 'wiki-18': 8}
  assert set(made) == {*prepare_data.names()}
  printed = capsys.readouterr().out
  assert f'{folder}/train.jsonl: 10 rows (nq 6, hotpotqa 4), sha256 ' + digest(
      (folder / 'train.jsonl').read_bytes()) in printed
  assert f'{source}/nq/train.jsonl: sha256 ' + digest(
      (source / 'nq/train.jsonl').read_bytes()) in printed
  assert (folder / 'wiki-18.jsonl').read_bytes() == gzip.decompress(
      (source / 'wiki-18.jsonl.gz').read_bytes())
  gpqa = questions_lib.read(folder / 'gpqa.jsonl')[1]
  assert (gpqa.uid, gpqa.answers, gpqa.text) == ('rec1', ('right 1',), (
      'Which, of "all",\nis 1?\n- a b\n- c\n- d\n- right 1'))


def test_the_test_file_is_seven_sets_with_the_hops_of_musique(source, tmp_path):
  folder = run(source, tmp_path / 'data', text='search_r1')
  sets = datasets.evaluation_sets(
      tmp_path, evaluate=str(folder / 'test.jsonl'),
      corpus=str(folder / 'wiki-18.jsonl'), own_train=True, world_seed=0,
      kinds=(), questions_per_hop=1, max_hops=1)
  assert tuple(one.name for one in sets) == SETS
  assert [q.hops for q in sets[5].questions] == [2, 3]
  question = sets[0].questions[1]
  assert (question.uid, question.text, question.answers) == (
      'nq/test_1', 'what is the nq of City 1', ('River 1', 'the river 1'))


def test_search_r1s_own_files_have_the_same_questions(source, tmp_path):
  parts = run(source, tmp_path / 'parts', text='search_r1')
  published.write_merged(source)
  merged = run(source, tmp_path / 'merged', text='search_r1')
  for name in ('train', 'test'):
    ours, theirs = (questions_lib.read(
        folder / f'{name}.jsonl', question_mark=True)
                    for folder in (parts, merged))
    assert ours == theirs
  note = json.loads((merged / prepare_data.NOTE).read_text())
  assert [*note['train']['sources']] == [str(source / 'train.parquet')]


def test_the_studys_questions_are_drawn_by_the_seed(
    source, tmp_path, monkeypatch):
  table = copy.deepcopy(prepare_data.TABLE)
  table['questions']['study_512']['simpleqa']['draw'] = 4
  monkeypatch.setattr(prepare_data, 'TABLE', table)

  def drawn(folder, seed):
    run(source, tmp_path / folder, files=('study_512',), seed=seed)
    read = questions_lib.read(tmp_path / folder / 'study_512.jsonl')
    assert len(read) == 3 + 4 + 2
    return {q.text for q in read if q.data_source == 'simpleqa'}

  assert drawn('a', 0) == drawn('b', 0) != drawn('c', 1)


def test_files_may_be_zipped_parquet_or_in_folders_of_their_hub_ids(
    source, tmp_path):
  plain = run(source, tmp_path / 'plain', text='search_r1')
  repo = source / 'RUC-NLPIR' / 'FlashRAG_datasets'
  (source / 'bamboogle').rename(tmp_path / 'bamboogle')
  repo.mkdir(parents=True)
  (tmp_path / 'bamboogle').rename(repo / 'bamboogle')
  nq = source / 'nq' / 'test.jsonl'
  nq.with_name('test.jsonl.gz').write_bytes(gzip.compress(nq.read_bytes()))
  nq.unlink()
  hotpotqa = source / 'hotpotqa' / 'dev.jsonl'
  published.parquet.write_table(published.Table.from_pylist([
      json.loads(line) for line in hotpotqa.open()]),
      hotpotqa.with_suffix('.parquet'))
  hotpotqa.unlink()
  other = run(source, tmp_path / 'other', text='search_r1')
  for name in ('train', 'test', 'wiki-18'):
    assert (plain / f'{name}.jsonl').read_bytes() == (
        other / f'{name}.jsonl').read_bytes()


def test_only_missing_and_damaged_files_are_made_again(source, tmp_path, capsys):
  folder = run(source, tmp_path / 'data', files=('train', 'train_nq'))
  before = (folder / 'train.jsonl').read_bytes()
  (folder / 'train.jsonl').write_bytes(before[:-9])
  capsys.readouterr()
  run(source, folder, files=('train', 'train_nq', 'asqa'))
  assert (folder / 'train.jsonl').read_bytes() == before
  assert (folder / 'asqa.jsonl').is_file()
  assert f'{folder}/train_nq.jsonl is whole' in capsys.readouterr().out
  with pytest.raises(ValueError, match='must have the 79,168 rows of nq'):
    run(source, folder, files=('train_nq',), any_rows=False)


def test_questions_that_nothing_can_match_are_left_out(
    source, tmp_path, capsys):
  rows = [published.flashrag('nq/train', n) for n in range(3)]
  rows[1]['golden_answers'] = ['The The']
  published.write_lines(source / 'nq/train.jsonl', rows)
  folder = run(source, tmp_path / 'data', files=('train_nq',))
  assert [q.uid for q in questions_lib.read(folder / 'train_nq.jsonl')] == [
      'train_0', 'train_2']
  assert 'left out 1 questions' in (out := capsys.readouterr().out)
  assert f'such as {source}/nq/train.jsonl, line 2.' in out


def truncated_gzip(source):
  file = source / 'wiki-18.jsonl.gz'
  file.write_bytes(file.read_bytes()[:-12])
  return 'wiki-18', r'whole gzip file, but .*wiki-18.jsonl.gz is not'


def broken_line(source):
  file = source / 'nq' / 'train.jsonl'
  file.write_text(file.read_text()[:-30])
  return 'train_nq', r'nq/train.jsonl, line 6 must be .*"golden_answers"'


def lacking_key(source):
  published.write_lines(source / 'asqa/dev.jsonl', [
      {'id': 'dev_0', 'golden_answers': ['x']}])
  return 'asqa', "asqa/dev.jsonl, line 1 must be .* it has no 'question'"


def lacking_golds(source):
  published.write_lines(source / 'asqa/dev.jsonl', [
      {'id': 'dev_0', 'question': 'who'}])
  return 'asqa', 'line 1 must have golden answers, but has none. Fetch'


def lacking_column(source):
  published.parquet.write_table(published.Table.from_pylist(
      [{'id': 'x', 'data_source': 'nq'}]), source / 'train.parquet')
  return 'train', 'train.parquet must have the columns .* lacks question'


def cut_parquet(source):
  published.write_merged(source)
  file = source / 'test.parquet'
  file.write_bytes(file.read_bytes()[:-100])
  return 'test', 'test.parquet must be a parquet file, but cannot be read'


def cut_csv(source):
  file = source / 'gpqa_diamond.csv'
  file.write_text(file.read_text()[:-30])
  return 'gpqa', 'gpqa_diamond.csv, row 3 must have a field in UTF-8 for each'


def lacking_csv_column(source):
  published.write_csv(source / 'simple_qa_test_set.csv', ['problem', 'topic'],
                      [['Who?', 'x']])
  return 'simpleqa', 'simple_qa_test_set.csv, row 1 must have golden answers'


def broken_passage(source):
  published.write_lines(source / 'wiki-18.jsonl.gz', [
      published.passages()[0], {'id': '1', 'title': 'T'}])
  return 'wiki-18', r"a passage must have contents.*line 2 has id: str, title: "


def missing_file(source):
  (source / 'popqa' / 'test.jsonl').unlink()
  return 'test', ('source must hold popqa/test.jsonl, but .* does not. Fetch it '
                  'from the data set RUC-NLPIR/FlashRAG_datasets')


def cut_vectors(source):
  published.write_vectors(source)
  file = source / 'part_ab'
  file.write_bytes(file.read_bytes()[:-4])
  return 'e5_Flat', r'e5_Flat.index must have 45 \+ 4 \* 8 \* 4 bytes, but has'


@pytest.mark.parametrize('damage', [
    truncated_gzip, broken_line, lacking_key, lacking_golds, lacking_column,
    cut_parquet, cut_csv, lacking_csv_column, broken_passage, missing_file,
    cut_vectors])
def test_a_damaged_file_is_refused_by_its_name(damage, source, tmp_path):
  name, message = damage(source)
  with pytest.raises((ValueError, FileNotFoundError), match=message):
    run(source, tmp_path / 'data', files=(name,), any_rows=name != 'e5_Flat')
  assert {file.name for file in (tmp_path / 'data').iterdir()} <= {
      'config.json', 'environment.json', '.lock'}


@pytest.mark.parametrize('name, message', [
    ('train', 'nq/train.jsonl must have the 79,168 rows of nq that were '
     'published, but has 6. Fetch it again, or take any number'),
    ('wiki-18', 'wiki-18.jsonl.gz must have the 21,015,324 rows of wiki-18 ')])
def test_another_number_of_rows_is_refused(name, message, source, tmp_path):
  with pytest.raises(ValueError, match=message):
    run(source, tmp_path / 'data', files=(name,), any_rows=False)
  published.write_merged(source)
  with pytest.raises(ValueError, match='test.parquet must have the 3,610 rows'):
    run(source, tmp_path / 'data', files=('test',), any_rows=False)


def test_parts_of_an_index_are_joined(source, tmp_path, monkeypatch):
  whole = published.write_vectors(source)
  table = copy.deepcopy(prepare_data.TABLE)
  table['vectors']['e5_Flat'].update(rows=8, dim=4)
  monkeypatch.setattr(prepare_data, 'TABLE', table)
  run(source, tmp_path / 'data', files=('e5_Flat',), any_rows=False)
  assert (tmp_path / 'data/e5_Flat.index').read_bytes() == whole


class Hub:
  """The hub's cache, whose blobs have their digests for names."""

  def __init__(self, source, cache):
    self.source, self.cache, self.asked = source, cache, []
    self.is_down = False

  def download(self, repo, path, *, repo_type):
    assert repo_type == 'dataset'
    self.asked.append(f'{repo}/{path}')
    if self.is_down:
      raise huggingface_hub.errors.LocalEntryNotFoundError('no route')
    data = (self.source / path).read_bytes()
    blob = self.cache / 'blobs' / digest(data)
    blob.parent.mkdir(exist_ok=True, parents=True)
    if not blob.exists():
      blob.write_bytes(data)
    link = self.cache / 'snapshots' / path
    link.parent.mkdir(exist_ok=True, parents=True)
    if not link.exists():
      link.symlink_to(blob)
    return str(link)


@pytest.fixture
def hub(source, tmp_path, monkeypatch):
  result = Hub(source, tmp_path / 'cache')
  monkeypatch.setattr(huggingface_hub, 'hf_hub_download', result.download)
  return result


def test_from_the_hub_a_stopped_command_goes_on(hub, source, tmp_path):
  folder = tmp_path / 'data'
  run('', folder, files=('train',))
  hub.is_down = True
  with pytest.raises(FileNotFoundError, match=(
      'nq/train.jsonl of the data set RUC-NLPIR/FlashRAG_datasets could not be '
      'fetched: LocalEntryNotFoundError no route. Log in')):
    run('', folder, text='search_r1')
  hub.is_down, hub.asked = False, []
  run('', folder, text='search_r1')
  assert 'RUC-NLPIR/FlashRAG_datasets/hotpotqa/train.jsonl' not in hub.asked
  assert 'PeterJinGo/wiki-18-corpus/wiki-18.jsonl.gz' in hub.asked
  theirs = run(source, tmp_path / 'other', text='search_r1')
  for name in ('train', 'test', 'wiki-18'):
    assert (folder / f'{name}.jsonl').read_bytes() == (
        theirs / f'{name}.jsonl').read_bytes()


def test_a_damaged_file_of_the_cache_is_named(hub, tmp_path):
  run('', tmp_path / 'data', files=('train_nq',))
  link = hub.cache / 'snapshots/nq/train.jsonl'
  blob = link.resolve()
  blob.write_bytes(blob.read_bytes()[:-1])
  with pytest.raises(ValueError, match=f'SHA-256 {blob.name} .* Delete {blob}'):
    run('', tmp_path / 'other', files=('train_nq',))


def test_models_are_fetched_by_name_or_id(hub, tmp_path, monkeypatch, capsys):
  fetched = []
  monkeypatch.setattr(huggingface_hub, 'snapshot_download', lambda name, **_: (
      fetched.append(name) or '/cache'))
  run('', tmp_path, files=(), models=('qwen2.5-3b', 'intfloat/e5-base-v2'))
  assert fetched == ['Qwen/Qwen2.5-3B', 'intfloat/e5-base-v2']
  assert 'Qwen/Qwen2.5-3B: /cache' in capsys.readouterr().out


class Bucket(memory.MemoryFileSystem):
  """An object store in memory, for gs://."""

  protocol = ('gcs', 'gs')


@pytest.mark.parametrize('where', ['folder', 'gs://bucket/data'])
def test_copies_are_whole_and_made_once(where, source, tmp_path, capsys):
  fsspec.register_implementation('gcs', Bucket, clobber=True)
  if where == 'folder':
    where = str(tmp_path / 'copies' / 'data')
  options = dict(files=('train', 'wiki-18'), copy_to=where)
  folder = run(source, tmp_path / 'data', **options)
  store = prepare_data.epath.Path(where)
  for name in ('train.jsonl', 'wiki-18.jsonl', prepare_data.NOTE):
    assert json.loads((store / prepare_data.NOTE).read_text()) == json.loads(
        (folder / prepare_data.NOTE).read_text())
    assert name == prepare_data.NOTE or (
        store / name).read_bytes() == (folder / name).read_bytes()
  capsys.readouterr()
  run(source, folder, **options)
  assert 'copied' not in capsys.readouterr().out


def test_a_store_that_cannot_be_used_is_refused_first(source, tmp_path):
  (tmp_path / 'file').write_text('')
  for where in (f'{tmp_path}/file/x', 'ftp://x/y'):
    with pytest.raises(ValueError, match='copy_to must be a folder, gs://'):
      run(source, tmp_path / 'data', copy_to=where)
  assert not [*pathlib.Path(tmp_path / 'data').glob('*.jsonl')]
