# Copyright The searchrl Authors
# SPDX-License-Identifier: Apache-2.0
r"""Generation on a toy model, ours and others', in turns on one machine.

  python benchmarks/peers_rollout.py --trl=V1/bin/python --tunix=V2/bin/python

Environments and model are those of `peers.py`: V1 has transformers, too. All
sample at temperature 1, without truncation, and none ends early.

  16x16x64, 64x16x64   rows x prompt tokens x sampled tokens, one turn, prompts
      that differ. `searchrl` is `models.inference.engine` with log-probs of
      what was sampled; `transformers` is `generate` with its KV cache, without
      log-probs, which a step of TRL's would compute later; `trl` is what
      GRPOTrainer generates with in a step, `_generate`; `tunix` is the vanilla
      sampler in a batch, log-probs included.
  agentic   4 questions x 4 samples, 2 turns of 64 sampled tokens each, 32
      tokens of a passage between them, instant search. `searchrl` is
      `rollouts.driver.run`; `tunix` is its RolloutOrchestrator with the vanilla
      engine, 16 conversations at a time.
  varied    the same with turns of any length: each token ends one with a
      chance of 1 in 64, and passages have 16 to 48 tokens, of the 160 that a
      conversation may have after its prompt.

With `--model=smollm2`, the shape is that of SmolLM2-135M, and the cases are of one
turn after 128 prompt tokens, of 1, 16 and 32 rows:

  python benchmarks/peers_rollout.py --model=smollm2 --trl=V1/bin/python

Useful tokens are those of samples that differ: Tunix's vanilla engine samples
every call with one key, so that all samples of a question are one. Its agentic
examples are meant for vLLM, which runs on no CPU toy. `agentic` is kinder to it
than its own learner, which lets a turn sample what is left of the conversation,
as `varied` does: each length that is left for the first time is compiled. Its
chat template is empty here, so that both read the same tokens.
"""

import argparse
import functools
import itertools
import json
import sys
import tempfile

import peers
import turns

CASES = {  # -> workers that take part
    '16x16x64': ('searchrl', 'transformers', 'trl', 'tunix'),
    '64x16x64': ('searchrl', 'transformers', 'trl', 'tunix'),
    'agentic': ('searchrl', 'tunix'),
    'varied': ('searchrl', 'tunix'),
}
LARGE = {f'{rows}x128x64': ('searchrl', 'transformers')
         for rows in (1, 16, 32)}
TURNS = 2
PASSAGE = 32  # tokens that a search inserts
RESPONSE = TURNS * peers.NEW_TOKENS + (TURNS - 1) * PASSAGE  # after the prompt
ENDS = tuple(range(504, 512))  # 8 of 512 tokens end a turn in `varied`


def main() -> None:
  parser = argparse.ArgumentParser(description=__doc__.partition('\n')[0])
  parser.add_argument('--trl', help='its python')
  parser.add_argument('--tunix', help='its python')
  parser.add_argument('--rounds', type=int, default=10)
  parser.add_argument('--model', choices=peers.SHAPES, default='toy')
  parser.add_argument('--cases', nargs='+', choices=[*CASES, *LARGE])
  parser.add_argument('--worker', choices=WORKERS, help=argparse.SUPPRESS)
  parser.add_argument('--shape', type=json.loads, help=argparse.SUPPRESS)
  parser.add_argument('--dtype', default='float32', help=argparse.SUPPRESS)
  options = parser.parse_args()
  options.shape = options.shape or peers.SHAPES[options.model]
  cases = CASES if options.model == 'toy' else LARGE
  if options.worker:
    WORKERS[options.worker](options)
    return
  pythons = {'searchrl': sys.executable, 'transformers': options.trl,
             'trl': options.trl, 'tunix': options.tunix}
  named = [name for name, python in pythons.items() if python and any(
      name in taking for taking in cases.values())]
  workers = {name: turns.Worker(
      pythons[name], __file__, name, f'--model={options.model}')
             for name in named}
  print(f'before: {turns.load()}')
  taken = {case: turns.run(
      [workers[name] for name in cases[case] if name in workers], case,
      rounds=options.rounds) for case in options.cases or cases}
  print(f'after: {turns.load()}\n')
  for worker in workers.values():
    worker.close()
  print('| case | | seconds | sampled tokens | tokens/s | of them useful '
        '| CPU ms a useful token | of searchrl\'s seconds a sampled token '
        '| of its CPU seconds a useful token |\n|' + '---|' * 9)
  for case, by_worker in taken.items():
    ours = medians(by_worker['searchrl'])
    for name in by_worker:
      found = medians(by_worker[name])
      print(f'| {case} | {name} | {found["secs"]:.3f} | {found["tokens"]:.0f} '
            f'| {found["tokens"] / found["secs"]:.0f} '
            f'| {found["useful"] / found["tokens"]:.2f} | {found["cost"]:.3f} '
            f'| {found["each"] / ours["each"]:.2f} '
            f'| {found["cost"] / ours["cost"]:.2f} |')


def medians(taken) -> dict[str, float]:
  """Medians over the turns of one worker, and two ratios of them.

  `each`: seconds a sampled token; `cost`: CPU ms a useful one.
  """
  middle = {name: turns.median(taken, name) for name in taken[0]}
  return dict(middle, each=middle['secs'] / middle['tokens'],
              cost=1000 * middle['cpu_secs'] / middle['useful'])


def counted(samples) -> dict[str, int]:
  """Counts the tokens of all samples, and those of samples that differ.

  Args:
    samples: One (prompt, ids that were sampled after it) for each sample.
  """
  samples = [(prompt, tuple(map(int, ids))) for prompt, ids in samples]
  return dict(tokens=sum(len(ids) for _, ids in samples),
              useful=sum(len(ids) for _, ids in set(samples)))


def questions(number: int) -> list[str]:
  """New ones for each turn of a worker, each as often as it is sampled."""
  return [text for text in peers.numbered(
      peers.QUESTIONS, number * peers.QUESTIONS) for _ in range(peers.SAMPLES)]


def passage(question: str, varied: bool) -> str:
  """The text that a search inserts."""
  return '?' * (16 + 7 * int(question) % 33 if varied else PASSAGE)


def sizes(case: str) -> list[int]:
  """Rows, prompt tokens and sampled tokens."""
  return [int(size) for size in case.split('x')]


class Tokenizer(peers.Characters):
  """The same tokenizer as our library takes it."""

  def encode(self, text, **_):
    return tuple(super().encode(text))

  encode_data = encode


def searchrl(options) -> None:
  """The engine by itself, and the driver with a search."""
  sys.path.insert(0, str(peers.ROOT))
  import jax
  import numpy as np
  from searchrl.models import transformer
  from searchrl.models.inference import engine as engines
  shape = transformer.TransformerConfig(
      head_dim=options.shape['hidden_size'] // options.shape[
          'num_attention_heads'], **options.shape)
  params = transformer.init(shape, jax.random.key(0))
  rng = np.random.default_rng(0)
  numbers = itertools.count()

  @functools.cache
  def engine(slots, length, ends=()):
    return engines.Engine(
        shape, slots=slots, length=length,
        stop_table=peers.never_stops(shape.vocab_size, ends))

  def one_turn(rows, prompt_tokens, new_tokens):
    own = engine(rows, prompt_tokens + new_tokens)
    own.load(params, 1.0)
    prompts = rng.integers(3, shape.vocab_size, (rows, prompt_tokens)).tolist()
    own.append([engines.Append(
        row, prompts[row], new_tokens, engines.row_ids(0, f'{row}', 0, 0), True)
                for row in range(rows)])
    stopped = []
    while len(stopped) < rows:
      stopped += own.decode()
    return counted((s.slot, s.tokens) for s in stopped)

  def conversations(most, ends):
    own = engine(peers.QUESTIONS * peers.SAMPLES,
                 peers.PROMPT_TOKENS + RESPONSE, ends)
    own.load(params, 1.0)
    return driven(own, questions(next(numbers)), most, varied=bool(ends))

  cases = dict(agentic=lambda: conversations(peers.NEW_TOKENS, ()),
               varied=lambda: conversations(RESPONSE, ENDS))
  turns.serve(lambda case: cases[case]() if case in cases
              else one_turn(*sizes(case)))


def driven(engine, texts, most: int, *, varied: bool) -> dict[str, int]:
  """Tokens of the driver's trajectories; `most` is of a turn."""
  from searchrl import trajectory
  from searchrl.agent import dialogue as dialogues
  from searchrl.rollouts import driver
  dialogue = dialogues.Dialogue(
      template='{question}', stop_strings=('never said',), before='', after='',
      invalid='', parse=lambda text: trajectory.Action('search', (text,)),
      passage=lambda number, passage: passage.text)
  trajectories, _ = driver.run(
      [trajectory.Request(trajectory.Question(text, text, ('',)),
                          i % peers.SAMPLES) for i, text in enumerate(texts)],
      engine=engine, dialogue=dialogue, tokenizer=Tokenizer(),
      search=lambda queries: [(trajectory.Passage('', '', passage(
          q.question.text, varied)),) for q in queries],
      budgets=driver.Budgets(
          max_turns=TURNS, max_new_tokens=most, top_k=1,
          max_prompt_tokens=peers.PROMPT_TOKENS, passage_tokens=RESPONSE),
      step=0, policy_step=0)
  return counted(
      (t.question.uid, sum((turn.action_tokens for turn in t.turns), ()))
      for t in trajectories)


def transformers(options) -> None:
  """transformers' `generate`, on a GPU if there is one."""
  import torch
  import transformers as hf
  torch.manual_seed(0)
  device = 'cuda' if torch.cuda.is_available() else 'cpu'
  with torch.device(device):
    model = hf.AutoModelForCausalLM.from_config(
        hf.Qwen2Config(**options.shape, tie_word_embeddings=True),
        dtype=getattr(torch, options.dtype)).eval()

  def work(case):
    rows, prompt_tokens, new_tokens = sizes(case)
    ids = torch.randint(3, options.shape['vocab_size'], (rows, prompt_tokens),
                        device=device)
    made = model.generate(
        ids, attention_mask=torch.ones_like(ids), generation_config=
        hf.GenerationConfig(
            do_sample=True, temperature=1.0, top_k=0, top_p=1.0,
            max_new_tokens=new_tokens, eos_token_id=None,
            pad_token_id=0)).cpu()
    assert made.shape == (rows, prompt_tokens + new_tokens)
    return counted((row, ids[prompt_tokens:])
                   for row, ids in enumerate(made.tolist()))

  turns.serve(work)


def trl(options) -> None:
  """Times GRPOTrainer's own generation, from texts to ids and texts."""
  del options
  with tempfile.TemporaryDirectory() as folder:
    trainer = peers.trl_trainer(folder, steps=1)

    def work(case):
      rows, *tokens = sizes(case)
      assert tokens == [peers.PROMPT_TOKENS, peers.NEW_TOKENS]
      made = trainer._generate(peers.numbered(rows))[1]
      return counted(enumerate(made))

    turns.serve(work)


def tunix(options) -> None:
  """Times Tunix's vanilla sampler: in a batch, and in one call per turn."""
  del options
  import asyncio
  import concurrent.futures
  from tunix.rl.agentic import utils
  from tunix.rl.agentic.agents import model_agent
  from tunix.rl.agentic.environments import base_environment
  from tunix.rl.agentic.parser.chat_template_parser import parser
  from tunix.rl.agentic.pipeline import rollout_orchestrator
  numbers = itertools.count()

  @functools.cache
  def cluster(cache, ends=(-1,)):
    return peers.tunix_cluster(
        1, max_prompt_length=32, kv_cache_size=cache, eos_tokens=list(ends),
        return_logprobs=True)[0]

  class Bare(parser.BaseChatTemplateParser):
    """A chat template that adds nothing."""

    def _init_tokens(self):
      return parser.TokenConfig()

    def _init_generation_prompt(self):
      return ''

  class Search(base_environment.BaseTaskEnv):
    """Finds the same for every action."""

    def _initial_observation(self):
      return self.task

    def _step_impl(self, action):
      return base_environment.EnvStepResult(
          observation=passage(
              self.task['prompts'], self.extra_kwargs['varied']),
          reward=0.0, done=False, info={})

  async def conversations(model, most, varied):
    chat = Bare(model.tokenizer)

    def call(messages, env=None, max_generation_steps=None):
      """Calls the model as AgenticRLLearner does, but for `most`."""
      env.task['policy_version'] = 0
      return model.generate(
          prompts=chat.parse(messages, add_generation_prompt=True,
                             is_first_msg=True),
          max_generation_steps=min(max_generation_steps, most))

    orchestrator = rollout_orchestrator.RolloutOrchestrator(
        rollout_sync_lock=utils.RolloutSyncLock(), max_concurrency=16,
        engine_kwargs=dict(model_call=call, tokenizer=model.tokenizer,
                           chat_parser=chat, max_response_length=RESPONSE + 1))
    pairs = [(model_agent.ModelAgent(''), Search(
        {'prompts': text}, max_steps=TURNS, group_id=i // peers.SAMPLES,
        pair_index=i % peers.SAMPLES, varied=varied))
             for i, text in enumerate(questions(next(numbers)))]
    producing = asyncio.create_task(orchestrator.run_producers_from_stream(
        pairs, group_size=peers.SAMPLES, collect_mode='Token',
        group_key_fn=lambda i, env, traj: env.extra_kwargs['group_id']))
    await asyncio.sleep(0)
    items = [item async for group in orchestrator.yield_batches(peers.SAMPLES)
             for item in group]
    await producing
    assert len(items) == len(pairs)
    return counted(
        (item.group_id, item.traj['conversation_tokens'][
            item.traj['conversation_masks'] == 1]) for item in items)

  def one_turn(rows, *tokens):
    assert tokens == (peers.PROMPT_TOKENS, peers.NEW_TOKENS)
    made = cluster(128).generate(peers.numbered(rows)).tokens
    return counted(enumerate(made))

  loop = asyncio.new_event_loop()  # as AgenticRLLearner makes it
  loop.set_default_executor(concurrent.futures.ThreadPoolExecutor(17))
  cases = dict(agentic=lambda: conversations(
      cluster(192), peers.NEW_TOKENS, False), varied=lambda: conversations(
          cluster(448, ENDS), RESPONSE, True))
  turns.serve(lambda case: loop.run_until_complete(cases[case]())
              if case in cases else one_turn(*sizes(case)))


WORKERS = {'searchrl': searchrl, 'transformers': transformers, 'trl': trl,
           'tunix': tunix}

if __name__ == '__main__':
  main()
