# Copyright The searchrl Authors
# SPDX-License-Identifier: Apache-2.0
r"""Generation on a toy, ours and others', in turns on one machine.

  python benchmarks/peers_rollout.py --trl=V1/bin/python --tunix=V2/bin/python

Environments and model are those of `peers.py`: V1 has transformers, too. All
sample at temperature 1, without truncation, and none ends early.

  16x16x64, 64x16x64   rows x prompt tokens x sampled tokens, one turn, prompts
      that differ. `searchrl` is `models.engine.Engine` with log-probs of what
      was sampled; `transformers` is `generate` with its KV cache and without
      log-probs, a step of TRL's would compute them later; `trl` is what
      GRPOTrainer generates with in a step, `_generate`; `tunix` is the vanilla
      sampler in a batch, log-probs included.
  agentic   4 questions x 4 samples, 2 turns of 64 sampled tokens each, 32
      tokens of a passage between them, instant search. `searchrl` is
      `agent.rollout.play`; `tunix` is its RolloutOrchestrator with the vanilla
      engine, 16 conversations at a time.
  varied    the same with turns of any length: each token ends one with a
      chance of 1 in 64, and passages have 16 to 48 tokens, of the 160 that a
      conversation may have after its prompt.

Useful tokens are those of samples that differ: Tunix's vanilla engine samples
every call with one key, so that all samples of a question are one. Its agentic
examples are meant for vLLM, which runs on no CPU toy. `agentic` is kinder to it
than its own learner, which lets a turn sample what is left of the conversation,
as `varied` does: each length that is left for the first time is compiled. Its
chat template here writes nothing, so that both read the same tokens.
"""

import argparse
import functools
import itertools
import json
import sys
import tempfile

import peers
import turns

CASES = {  # -> who plays it
    '16x16x64': ('searchrl', 'transformers', 'trl', 'tunix'),
    '64x16x64': ('searchrl', 'transformers', 'trl', 'tunix'),
    'agentic': ('searchrl', 'tunix'),
    'varied': ('searchrl', 'tunix'),
}
TURNS = 2
FOUND = 32  # tokens that a search inserts
AFTER = TURNS * peers.SAID + (TURNS - 1) * FOUND  # the prompt
ENDS = tuple(range(504, 512))  # 8 of 512 words end a turn in `varied`


def main() -> None:
  parser = argparse.ArgumentParser(description=__doc__.partition('\n')[0])
  parser.add_argument('--trl', help='its python')
  parser.add_argument('--tunix', help='its python')
  parser.add_argument('--rounds', type=int, default=10)
  parser.add_argument('--cases', nargs='+', choices=CASES, default=[*CASES])
  parser.add_argument('--worker', choices=WORKERS, help=argparse.SUPPRESS)
  parser.add_argument('--shape', type=json.loads, default=peers.SHAPE,
                      help=argparse.SUPPRESS)
  parser.add_argument('--dtype', default='float32', help=argparse.SUPPRESS)
  options = parser.parse_args()
  if options.worker:
    WORKERS[options.worker](options)
    return
  pythons = {'searchrl': sys.executable, 'transformers': options.trl,
             'trl': options.trl, 'tunix': options.tunix}
  workers = {name: turns.Worker(python, __file__, name)
             for name, python in pythons.items() if python}
  print(f'before: {turns.load()}')
  taken = {case: turns.play(
      [workers[name] for name in CASES[case] if name in workers], case,
      rounds=options.rounds) for case in options.cases}
  print(f'after: {turns.load()}\n')
  for worker in workers.values():
    worker.close()
  print('| case | | seconds | sampled tokens | tokens/s | of them useful '
        '| CPU ms a useful token | of searchrl\'s seconds a sampled token '
        '| of its CPU seconds a useful token |\n|' + '---|' * 9)
  for case, its in taken.items():
    ours = facts(its['searchrl'])
    for name in its:
      told = facts(its[name])
      print(f'| {case} | {name} | {told["secs"]:.3f} | {told["tokens"]:.0f} '
            f'| {told["tokens"] / told["secs"]:.0f} '
            f'| {told["useful"] / told["tokens"]:.2f} | {told["cost"]:.3f} '
            f'| {told["each"] / ours["each"]:.2f} '
            f'| {told["cost"] / ours["cost"]:.2f} |')


def facts(its) -> dict[str, float]:
  """Medians over the turns of one worker, and two shares of them.

  `each`: seconds a sampled token; `cost`: CPU ms a useful one.
  """
  told = {name: turns.median(its, name) for name in its[0]}
  return dict(told, each=told['secs'] / told['tokens'],
              cost=1000 * told['cpu_secs'] / told['useful'])


def counted(samples) -> dict[str, int]:
  """Tokens of samples, and those of samples that differ.

  Args:
    samples: (prompt, ids that were sampled after it), one each.
  """
  samples = [(prompt, tuple(map(int, said))) for prompt, said in samples]
  return dict(tokens=sum(len(said) for _, said in samples),
              useful=sum(len(said) for _, said in set(samples)))


def questions(number: int) -> list[str]:
  """Of one agentic turn, others in each; as often as they are sampled."""
  return [text for text in peers.numbered(
      peers.QUESTIONS, number * peers.QUESTIONS) for _ in range(peers.SAMPLES)]


def found(question: str, varied: bool) -> str:
  """What a search inserts."""
  return '?' * (16 + 7 * int(question) % 33 if varied else FOUND)


def sizes(case: str) -> list[int]:
  """Rows, prompt tokens and sampled tokens."""
  return [int(size) for size in case.split('x')]


class Words(peers.Characters):
  """The same tokenizer as our library takes it."""

  def encode(self, text, **_):
    return tuple(super().encode(text))

  encode_data = encode


def searchrl(options) -> None:
  """The engine by itself, and the driver with a search."""
  sys.path.insert(0, str(peers.ROOT))
  import jax
  import numpy as np
  from searchrl import trajectory
  from searchrl.agent import dialogue as dialogues
  from searchrl.rollouts import driver
  from searchrl.models.inference import engine as engines
  from searchrl.models import transformer
  shape = transformer.TransformerConfig(head_dim=32, **options.shape)
  params = transformer.init(shape, jax.random.key(0))
  rng = np.random.default_rng(0)
  played = itertools.count()

  @functools.cache
  def engine(slots, length, ends=()):
    return engines.Engine(
        shape, slots=slots, length=length, eos_ids=ends,
        stop_table=peers.never_stops(shape.vocab_size))

  def one_turn(rows, prompt, said):
    mine = engine(rows, prompt + said)
    mine.load(params, 1.0)
    prompts = rng.integers(3, shape.vocab_size, (rows, prompt)).tolist()
    mine.append([engines.Append(
        row, prompts[row], said, engines.row_ids(0, f'{row}', 0, 0), True)
                 for row in range(rows)])
    stopped = []
    while len(stopped) < rows:
      stopped += mine.decode()
    return counted((s.slot, s.tokens) for s in stopped)

  speech = dialogues.Dialogue(
      template='{question}', stop_strings=('never said',), before='', after='',
      invalid='', parse=lambda text: trajectory.Action('search', (text,)),
      passage=lambda number, passage: passage.text)

  def conversations(most, ends):
    mine = engine(peers.QUESTIONS * peers.SAMPLES, peers.PROMPT + AFTER, ends)
    mine.load(params, 1.0)
    games = driver.play(
        [(trajectory.Question(text, text, ('',)), i % peers.SAMPLES)
         for i, text in enumerate(questions(next(played)))],
        engine=mine, dialogue=speech, tokenizer=Words(),
        search=lambda queries: [(trajectory.Passage('', '', found(
            q.question.text, varied=bool(ends))),) for q in queries],
        budgets=driver.Budgets(
            max_turns=TURNS, max_turn_tokens=most, top_k=1,
            max_prompt_tokens=peers.PROMPT, passage_tokens=AFTER),
        row_ids=engines.row_ids, append=engines.Append, step=0, policy_step=0)
    return counted((g.question.uid, sum((t.action_tokens for t in g.turns), ()))
                   for g in games)

  cases = dict(agentic=lambda: conversations(peers.SAID, ()),
               varied=lambda: conversations(AFTER, ENDS))
  turns.serve(lambda case: cases[case]() if case in cases
              else one_turn(*sizes(case)))


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
    rows, prompt, said = sizes(case)
    ids = torch.randint(3, options.shape['vocab_size'], (rows, prompt),
                        device=device)
    made = model.generate(
        ids, attention_mask=torch.ones_like(ids), generation_config=
        hf.GenerationConfig(
            do_sample=True, temperature=1.0, top_k=0, top_p=1.0,
            max_new_tokens=said, eos_token_id=None, pad_token_id=0)).cpu()
    assert made.shape == (rows, prompt + said)
    return counted((row, its[prompt:]) for row, its in enumerate(made.tolist()))

  turns.serve(work)


def trl(options) -> None:
  """What GRPOTrainer generates with, from texts to ids and texts."""
  del options
  with tempfile.TemporaryDirectory() as folder:
    trainer = peers.trl_trainer(folder, steps=1)

    def work(case):
      rows, prompt, said = sizes(case)
      assert prompt == peers.PROMPT and said == peers.SAID
      made = trainer._generate(peers.numbered(rows))[1]
      return counted(enumerate(made))

    turns.serve(work)


def tunix(options) -> None:
  """Its vanilla sampler in a batch, and one call a turn of a conversation."""
  del options
  import asyncio
  import concurrent.futures
  from tunix.rl.agentic import utils
  from tunix.rl.agentic.agents import model_agent
  from tunix.rl.agentic.environments import base_environment
  from tunix.rl.agentic.parser.chat_template_parser import parser
  from tunix.rl.agentic.pipeline import rollout_orchestrator
  played = itertools.count()

  @functools.cache
  def cluster(cache, ends=(-1,)):
    return peers.tunix_cluster(
        1, max_prompt_length=32, kv_cache_size=cache, eos_tokens=list(ends),
        return_logprobs=True)[0]

  class Bare(parser.BaseChatTemplateParser):
    """A chat template without a word of its own."""

    def _init_tokens(self):
      return parser.TokenConfig()

    def _init_generation_prompt(self):
      return ''

  class Search(base_environment.BaseTaskEnv):
    """Finds the same, whatever was said."""

    def _initial_observation(self):
      return self.task

    def _step_impl(self, action):
      return base_environment.EnvStepResult(
          observation=found(self.task['prompts'], self.extra_kwargs['varied']),
          reward=0.0, done=False, info={})

  async def conversations(model, most, varied):
    chat = Bare(model.tokenizer)

    def call(messages, env=None, max_generation_steps=None):
      """As AgenticRLLearner calls the model, but for `most`."""
      env.task['policy_version'] = 0
      return model.generate(
          prompts=chat.parse(messages, add_generation_prompt=True,
                             is_first_msg=True),
          max_generation_steps=min(max_generation_steps, most))

    orchestrator = rollout_orchestrator.RolloutOrchestrator(
        rollout_sync_lock=utils.RolloutSyncLock(), max_concurrency=16,
        engine_kwargs=dict(model_call=call, tokenizer=model.tokenizer,
                           chat_parser=chat, max_response_length=AFTER + 1))
    pairs = [(model_agent.ModelAgent(''), Search(
        {'prompts': text}, max_steps=TURNS, group_id=i // peers.SAMPLES,
        pair_index=i % peers.SAMPLES, varied=varied))
             for i, text in enumerate(questions(next(played)))]
    playing = asyncio.create_task(orchestrator.run_producers_from_stream(
        pairs, group_size=peers.SAMPLES, collect_mode='Token',
        group_key_fn=lambda i, env, traj: env.extra_kwargs['group_id']))
    await asyncio.sleep(0)
    games = [game async for group in orchestrator.yield_batches(peers.SAMPLES)
             for game in group]
    await playing
    assert len(games) == len(pairs)
    return counted(
        (game.group_id, game.traj['conversation_tokens'][
            game.traj['conversation_masks'] == 1]) for game in games)

  def one_turn(rows, prompt, said):
    assert prompt == peers.PROMPT and said == peers.SAID
    made = cluster(128).generate(peers.numbered(rows)).tokens
    return counted(enumerate(made))

  loop = asyncio.new_event_loop()  # as AgenticRLLearner makes it
  loop.set_default_executor(concurrent.futures.ThreadPoolExecutor(17))
  cases = dict(agentic=lambda: conversations(
      cluster(192), peers.SAID, False), varied=lambda: conversations(
          cluster(448, ENDS), AFTER, True))
  turns.serve(lambda case: loop.run_until_complete(cases[case]())
              if case in cases else one_turn(*sizes(case)))


WORKERS = {'searchrl': searchrl, 'transformers': transformers, 'trl': trl,
           'tunix': tunix}

if __name__ == '__main__':
  main()
