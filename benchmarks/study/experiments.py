# Copyright The searchrl Authors
# SPDX-License-Identifier: Apache-2.0
"""Experiments of benchmarks/study/learning.py: arms and command lines.

Hypothesis, measure and the smallest difference that counts were written down
before any run. A seed s of an arm trains on world s + 1 and is tested on world
s + 101, whatever the arm, so that differences are paired by world.
"""

from collections.abc import Iterator, Mapping, Sequence
import dataclasses
from typing import Any

import paired  # beside this file

SEEDS = (0, 1, 2, 3, 4)
CALIBRATION_SEED = 99  # whose worlds, 100 and 200, no other run has
STEPS = 24  # of 72 trajectories: the laptop run
TRAJECTORIES = 72  # a step

_ENCODER = dict(encoder='tiny_e5')
ENGINES = {  # -> engine and options
    'noise': ('noise', {}),
    'bm25': ('bm25', {}),
    'hnsw': ('dense', _ENCODER | dict(  # sparse, and hasty: a low ef
        backend='hnsw', links=8, construction=20, visited=2, min_recall=0.0)),
    'exact': ('dense', _ENCODER | dict(backend='exact')),
}
TINY_RAW = 'tiny_raw'
DIALOGUE = 'searchrl.agent.dialogue:laptop'

# During training: greedy answers to a few questions of the test's world.
CURVE_HOPS = (1, 2, 3)
CURVE = {
    'evaluate.noise': False,
    'evaluate.decodings': ('greedy',),
    'evaluate.worlds.kinds': ('known',),
    'evaluate.worlds.questions_per_hop': 32,
    'evaluate.worlds.max_hops': len(CURVE_HOPS),
    'evaluate.every': 6,  # steps
    'train.loggers': (),
    'train.progress': False,
    'train.keep_checkpoints': 1,
}
FILTERED = ('dapo', 'dspo')  # a step samples up to three times as much
EVALUATIONS = {  # of the whole policy: what configs/evaluate.py is told
    'full': {  # greedy answers to fresh questions are 200 a hop count
        'evaluate.noise': False,
        'evaluate.worlds.sampled_per_hop': 50,  # sampled
        'evaluate.worlds.kinds': ('known', 'famous', 'outdated'),
        'evaluate.worlds.questions_per_hop': 200,
        'evaluate.worlds.common_per_hop': 50,
        'evaluate.worlds.max_hops': 4,
    },
    'unseen': {
        'evaluate.noise': False,
        'evaluate.decodings': ('greedy',),
        'evaluate.worlds.kinds': ('unseen',),
        'evaluate.worlds.questions_per_hop': 50,
        'evaluate.worlds.max_hops': 3,
    },
}
JUDGED = EVALUATIONS['unseen'] | {  # through an engine that is not the arm's
    'evaluate.worlds.kinds': ('known',)}

Records = Mapping[tuple[str, int], Mapping[str, Any]]  # (arm, seed) -> record


@dataclasses.dataclass(frozen=True)
class Arm:
  """One way to train a policy, or a base model as it is."""

  name: str  # equal names are one arm, also of several experiments
  recipe: str = ''  # of configs/; '': not trained
  size: str = 'laptop'
  training: Mapping[str, Any] = dataclasses.field(default_factory=dict)
  policy: Mapping[str, Any] = dataclasses.field(default_factory=dict)  # both
  engine: str = 'bm25'  # trained and judged with; of ENGINES
  judges: tuple[str, ...] = ()  # further engines
  reads: bool = False  # passages stand in its questions; see reading.py
  evaluations: tuple[str, ...] = ('full',)  # of EVALUATIONS
  seeds: tuple[int, ...] = ()  # its own; (): those asked for
  solver: str = ''  # the run of self-play that is judged; '': the run itself
  devices: int = 1  # simulated devices of the training

  @property
  def steps(self) -> int:
    """The number of training steps, of 72 trajectories each."""
    return self.training.get('train.num_steps', STEPS) if self.recipe else 0


@dataclasses.dataclass(frozen=True)
class Experiment:
  """A question, and the arms that answer it."""

  hypothesis: str
  measures: tuple[str, ...]  # of report.MEASURES; the first decides
  smallest: float  # difference of a measure that counts
  arms: tuple[Arm, ...]
  pairs: tuple[tuple[str, str], ...]  # of arms: the first minus the second


def all_of(found: Records) -> dict[str, Experiment]:
  """Every experiment; the matched arms once calibration has its records."""
  return {'recipes': RECIPES, 'thirds': THIRDS, 'stress': _stress(found),
          'noise': NOISE, 'prompts': PROMPTS, 'engines': ENGINES_COMPARED,
          'masking': MASKING, 'format': FORMAT, 'simulated': SIMULATED,
          'writers': WRITERS, 'selfplay': SELFPLAY, 'rivals': RIVALS,
          'ablations': ABLATIONS, 'turns': TURNS,
          'beside': BESIDE}


def train_options(arm: Arm, seed: int) -> dict[str, Any]:
  """Returns the config's options with which an arm is trained, by name."""
  if arm.solver:
    return {'seed': seed, 'data.world_seed': seed + 1} | _QUIET | arm.training
  every = 2 if arm.recipe in FILTERED else CURVE['evaluate.every']
  return _of_seed(seed) | CURVE | {
      'evaluate.every': every, 'data.world_seed': seed + 1} | _searches(
          arm.engine) | arm.policy | arm.training


def evaluation_options(arm: Arm, seed: int) -> dict[str, dict[str, Any]]:
  """{evaluation: what it is told}; but for the run, and for files."""
  shared = _of_seed(seed) | arm.policy
  return {name: shared | _searches(arm.engine) | EVALUATIONS[name]
          for name in arm.evaluations} | {
              f'through_{engine}': shared | _searches(engine) | JUDGED
              for engine in arm.judges}


def commands(arm: Arm, seed: int) -> dict[str, list[str]]:
  """{part of a run: the arguments of main}, in order; without folders."""
  train = {'train': _flags(f'configs/{arm.recipe}.py:{arm.size}',
                           train_options(arm, seed))} if arm.recipe else {}
  return train | {part: _flags('configs/evaluate.py', options) for part, options
                  in evaluation_options(arm, seed).items()}


def _of_seed(seed: int) -> dict[str, Any]:
  return {'seed': seed, 'evaluate.worlds.world_seed': seed + 101}


def _searches(engine: str) -> dict[str, Any]:
  name, options = ENGINES[engine]
  return {'search.engine': name, 'search.options': options}


def _flags(config: str, options: Mapping[str, Any]) -> list[str]:
  return [f'--config={config}',
          *(f'--config.{name}={value}' for name, value in options.items())]


# Recipes at the default -------------------------------------------------------

BASE = Arm('base', judges=('noise',), evaluations=('full', 'unseen'))
_JUDGES = {'dspo': ('noise',), 'grpo': ('noise', 'hnsw', 'exact')}
_TRAINING = {'dspo': {'learner.minibatches': 2}}  # what all others have
_OF_RECIPES = {name: Arm(name, name, judges=_JUDGES.get(name, ()),
                         training=_TRAINING.get(name, {}),
                         evaluations=('full', 'unseen')) for name in (
    'dspo', 'grpo', 'dapo', 'gspo', 'dr_grpo', 'gmpo', 'hrpo', 'ppo',
    'reinforce', 'reinforce_plus_plus', 'rloo')}
GRPO = _OF_RECIPES['grpo']  # also the arm of others that change nothing
RECIPES = Experiment(
    hypothesis='Every recipe lifts greedy exact match of 1 to 3 hops far above '
    "the base's. At the default's small updates none differs from GRPO by .05: "
    'what is learned is mostly one decision, to go on while the plan is not '
    'done, and any gradient of the right sign teaches it.',
    measures=('greedy', 'greedy, 4 hops', 'sampled', 'area', 'steps to .6'),
    smallest=0.05,
    arms=(BASE, *_OF_RECIPES.values()),
    pairs=(('grpo', 'base'), *((name, 'grpo') for name in _OF_RECIPES
                               if name != 'grpo')))

_DSPO = _OF_RECIPES['dspo']
THIRDS = Experiment(
    hypothesis='Added after five seeds of DSPO, which answered .68 of 3 hops '
    'greedily. Its filter samples more for a batch, so that it makes 15 batches '
    'of what GRPO makes 24 of. With three updates a batch, as many in all as '
    'GRPO has, it answers .70 of them or more, and no hop count worse by .05. '
    '(It did, and is the default since.)',
    measures=('greedy', 'greedy, 4 hops', 'searches', 'sampled', 'area'),
    smallest=0.05,
    arms=(_DSPO, dataclasses.replace(
        _DSPO, name='dspo in thirds', training={'learner.minibatches': 3})),
    pairs=(('dspo in thirds', 'dspo'),))

# Credit by turn --------------------------------------------------------------

TURNS = Experiment(
    hypothesis='Written before any run. On 1 to 3 hops neither MT-GRPO nor '
    'GiGPO differs from GRPO by .05: with small updates any gradient of the '
    'right sign teaches the one decision to go on. On 4 hops MT-GRPO, which is '
    'paid for the passage with the answer even if the answer is wrong, is above '
    'GRPO by .05. GiGPO, whose discount prefers short samples, searches less '
    'than GRPO on 4 hops.',
    measures=('greedy', 'greedy, 4 hops', 'searches', 'sampled', 'area'),
    smallest=0.05,
    arms=(GRPO, Arm('mt_grpo', 'mt_grpo'), Arm('gigpo', 'gigpo'),
          Arm('gigpo undiscounted', 'gigpo',
              training={'algorithm.discount': 1.0})),
    pairs=(('mt_grpo', 'grpo'), ('gigpo', 'grpo'),
           ('gigpo undiscounted', 'grpo')))

# Rollouts beside training -----------------------------------------------------

BESIDE = Experiment(
    hypothesis='Written before any run. One device samples with the policy of '
    'the step before, while another one trains. The ratio divides by the log-'
    'probs of the policy that sampled, and updates are small, so greedy exact '
    'match of 1 to 3 hops is within .05 of GRPO, and the interval, too.',
    measures=('greedy', 'greedy, 4 hops', 'searches', 'area'),
    smallest=0.05,
    arms=(GRPO, Arm('grpo beside', 'grpo', devices=2, training={
        'train.max_staleness': 1, 'train.rollout_devices': 1})),
    pairs=(('grpo beside', 'grpo'),))

# Larger updates ---------------------------------------------------------------

STRESSED = ('grpo', 'dapo', 'gspo', 'dspo')
RUNGS = ('stress_1', 'stress_2', 'stress_3')
CLIPS = {  # recipe -> the ranges that calibration tries, its own among them
    'grpo': (0.02, 0.05, 0.1, 0.2, 0.4), 'gspo': (0.02, 0.05, 0.1, 0.2, 0.4)}
_OWN_CLIP = {'grpo': 0.2, 'gspo': 0.05}
_CALIBRATION_STEPS = 10


def at_rung(recipe: str, rung: str) -> str:
  """The name of an arm; the first rung is the recipe's default."""
  return recipe if rung == RUNGS[0] else f'{recipe} {rung}'


def _clipped(recipe: str, clip: float) -> dict[str, float]:
  return {'algorithm.clip_low': clip, 'algorithm.clip_high': clip}


def _calibration(recipe: str, clip: float) -> Arm:
  return Arm(f'{recipe} clipped at {clip}', recipe, RUNGS[1], _clipped(
      recipe, clip) | {'train.num_steps': _CALIBRATION_STEPS,
                       'evaluate.initial': False,
                       'evaluate.every': 0, 'evaluate.worlds.kinds': ()},
             evaluations=(), seeds=(CALIBRATION_SEED,))


def clip_fractions(found: Records) -> dict[str, dict[float, float]]:
  """{recipe: {clip range: clip fraction}}, means over calibration's steps."""
  result = {}
  for recipe, clips in CLIPS.items():
    records = {clip: found.get((_calibration(recipe, clip).name,
                                CALIBRATION_SEED)) for clip in clips}
    result[recipe] = {
        clip: sum(curve) / len(curve) for clip, record in records.items()
        if record and (curve := record['curves']['actor/pg_clipfrac'])}
  return result


def matched(found: Records) -> tuple[Arm, ...]:
  """Each ratio with the range that clips as often as the other's own range.

  A clipped sequence loses the gradient of all of its tokens, so that a share
  of sequences compares with a share of tokens. The range is that of the grid
  whose fraction is nearest, as a ratio. () until all of the grid is measured.
  """
  fractions = clip_fractions(found)
  if any(len(fractions[recipe]) < len(CLIPS[recipe]) for recipe in CLIPS):
    return ()
  arms = []
  for recipe, other in (('grpo', 'gspo'), ('gspo', 'grpo')):
    clip = paired.nearest(
        fractions[recipe], fractions[other][_OWN_CLIP[other]])
    arms.append(Arm(f'{recipe} stress_2 matched', recipe, RUNGS[1],
                    _clipped(recipe, clip)))
  return tuple(arms)


def _stress(found: Records) -> Experiment:
  arms = [Arm(at_rung(recipe, rung), recipe, rung)
          for rung in RUNGS[1:] for recipe in STRESSED]
  return Experiment(
      hypothesis='At stress_1, the default, nothing ranks. At stress_2 ratios '
      'of a sequence (GSPO, DSPO) beat ratios of a token (GRPO, DAPO); at '
      'stress_3 the filter (DAPO, DSPO) decides. The range explains at least '
      'half of what the ratio seems to: with matched clip fractions the '
      'difference of GSPO and GRPO at stress_2 is less than half as large.',
      measures=('greedy', 'area', 'reward'),
      smallest=0.1,
      arms=(*(_OF_RECIPES[name] for name in STRESSED), *arms, *(
          _calibration(recipe, clip) for recipe in CLIPS
          for clip in CLIPS[recipe]), *matched(found)),
      pairs=(*((at_rung(a, rung), at_rung(b, rung)) for rung in RUNGS
               for a, b in (('gspo', 'grpo'), ('dspo', 'dapo'),
                            ('dapo', 'grpo'), ('dspo', 'gspo'))),
             ('gspo stress_2', 'grpo stress_2 matched'),
             ('gspo stress_2 matched', 'grpo stress_2'),
             ('grpo stress_2 matched', 'grpo stress_2'),
             ('gspo stress_2 matched', 'gspo stress_2')))


# Random passages, and the base's three prompts --------------------------------

_NO_SEARCH = {'dialogue': f'{DIALOGUE}_answer', 'rollout.budgets.max_turns': 1}
DIRECT = Arm('direct', policy=_NO_SEARCH)
NOISE = Experiment(
    hypothesis='Trained on random passages, GRPO stops searching: below .2 '
    'searches a question after 20 steps. What it then knows of famous '
    'questions is not separably less than direct answers know.',
    measures=('famous', 'searches', 'greedy'),
    smallest=0.05,
    arms=(Arm('grpo on noise', 'grpo', training={'train.num_steps': 20},
              engine='noise', judges=('bm25',)), DIRECT),
    pairs=(('grpo on noise', 'direct'),))
PROMPTS = Experiment(
    hypothesis='On fresh facts search with RL is above one retrieval by the '
    'question, and that is above direct answers and R1 (GRPO without search), '
    'each separably. Direct against R1: as it comes out.',
    measures=('greedy', 'famous', 'outdated', 'sampled'),
    smallest=0.05,
    arms=(BASE, DIRECT, Arm('r1', 'grpo', policy=_NO_SEARCH),
          Arm('rag', policy={'dialogue': f'{DIALOGUE}_read',
                             'rollout.budgets.max_turns': 1,
                             'rollout.budgets.max_prompt_tokens': 400},
              reads=True), GRPO),
    pairs=(('grpo', 'rag'), ('rag', 'direct'), ('rag', 'r1'),
           ('r1', 'direct')))

# Engines ----------------------------------------------------------------------

WORLDS = {'': {}, ' hard': {'world.hard': True}}


def through(engine: str, world: str) -> str:
  """The name of the arm that is trained through an engine, on a world."""
  return f'grpo {engine}{world}' if (engine, world) != ('bm25', '') else 'grpo'


ENGINES_COMPARED = Experiment(
    hypothesis='A better engine makes a better agent: on the hard world exact '
    'search is separably above BM25, and BM25 above noise; HNSW at a low ef '
    'lies between exact search and BM25. On the plain world only noise is '
    'below the others by .05.',
    measures=('greedy', 'searches', 'area', *(
        f'through_{engine}' for engine in ENGINES)),
    smallest=0.05,
    arms=(GRPO, *(
        Arm(through(engine, world), 'grpo', engine=engine, policy=options,
            judges=tuple(other for other in ENGINES if other != engine))
        for world, options in WORLDS.items() for engine in ENGINES
        if (engine, world) != ('bm25', ''))),
    pairs=tuple((through(a, world), through(b, world)) for world in WORLDS
                for a, b in (('exact', 'bm25'), ('exact', 'hnsw'),
                             ('hnsw', 'bm25'), ('bm25', 'noise'))))

# An engine that is simulated -------------------------------------------------

OF_SIMULATED = ('greedy', 'greedy, 1 hop', 'greedy, 2 hops', 'greedy, 3 hops',
                'sampled', 'area', 'leak', 'last hop answered')
CURRICULA = {  # the probability of noise, from the first step to the last
    'none': (0.0, 0.0), 'rising': (0.0, 0.5), 'falling': (0.5, 0.0),
    'constant': (0.25, 0.25)}


def _simulated(curriculum: str) -> Arm:
  """Trained against the oracle alone, judged through BM25."""
  start, end = CURRICULA[curriculum]
  return Arm(f'oracle {curriculum}', 'zerosearch', training={
      'search.engine': 'searchrl.papers.zerosearch.simulated:make',
      'search.options': dict(
          writer='oracle', titled=True, curriculum=dict(
              start=start, end=end, base=4.0, steps=STEPS))})


SIMULATED = Experiment(
    hypothesis='Judged through BM25, an agent that has met an oracle alone is as '
    'good as one trained with BM25, by less than .05, and far above one trained '
    'on random passages. As in ZeroSearch, noise that rises beats noise that '
    'falls, separably; a constant .25 lies between, and rising noise is not '
    'below none. (Seed 0 of the rising one had been seen when this was written.)',
    measures=OF_SIMULATED,
    smallest=0.05,
    arms=(GRPO, Arm(through('noise', ''), 'grpo', engine='noise',
                    judges=('bm25', 'hnsw', 'exact')),
          *map(_simulated, CURRICULA)),
    pairs=(('oracle none', 'grpo'), ('oracle rising', 'grpo'),
           ('oracle rising', 'oracle falling'),
           ('oracle rising', 'oracle constant'),
           ('oracle constant', 'oracle falling'),
           ('oracle rising', 'oracle none'),
           ('oracle rising', through('noise', ''))))

SIMULATORS = 'runs/simulators'  # made by simulators.py
_TUNED = f'{SIMULATORS}/tuned/model'
WRITERS_OF = {  # arm -> its model, and whether it is told the answer
    'prompted': ('', True), 'tuned': (_TUNED, True),
    'tuned, unseeing': (f'{SIMULATORS}/unseeing/model', False)}


def simulator_prompts(told: bool) -> dict[str, str]:
  """Returns the prompts for useful and for noisy documents."""
  answer = 'Answer: {ground_truth}\n' if told else ''
  return {quality: f'{quality.capitalize()} documents: {{query}}\n'
                   f'Question: {{problem}}\n{answer}'
          for quality in ('useful', 'noisy')}


def _written(name: str) -> Arm:
  """Trained against a language model's documents alone, without noise."""
  path, told = WRITERS_OF[name]
  return Arm(name, 'zerosearch', training={
      'rollout.search_timeout_secs': 600.0,
      'search.engine': 'searchrl.papers.zerosearch.simulated:make',
      'search.options': dict(
          writer='model', path=path, prompts=simulator_prompts(told),
          titled=True, max_prompt_tokens=96, max_tokens=112, slots=16,
          curriculum=dict(start=0.0, end=0.0, base=4.0, steps=STEPS))})


WRITERS = Experiment(
    hypothesis='Written when the reports of the simulators had been seen, but '
    'no policy trained on them. Judged through BM25, without noise in training: '
    'the tuned simulator, told the answer, teaches nearly what the oracle does, '
    'by less than .1, though its documents of earlier hops name entities that '
    'the world does not have. Not told the answer, it is below that by .1 or '
    'more: what it writes is not rewarded. Prompted, it writes nothing that can '
    'be read, and is no better than random passages.',
    measures=OF_SIMULATED,
    smallest=0.05,
    arms=(GRPO, SIMULATED.arms[1], _simulated('none'),
          *map(_written, WRITERS_OF)),
    pairs=(('tuned', 'grpo'), ('tuned', 'oracle none'),
           ('tuned', 'tuned, unseeing'), ('tuned', 'prompted'),
           ('prompted', through('noise', '')),
           ('tuned, unseeing', through('noise', ''))))

# What is trained on, and for --------------------------------------------------

# The policy's tokens are the denominators in both arms, so that they weigh
# alike in the loss. But the norm to which gradients are clipped, and
# Adam's, are of the sum: gradients of observations shrink the policy's step.
_LONGER = {'optimizer.learning_rate': 3e-4, 'learner.minibatches': 2,
           'train.num_steps': 60}
MASKING = Experiment(
    hypothesis='Training on what was read, too, costs sampled exact match: '
    'gradients spent on text of the engine. Greedy answers differ less.',
    measures=('sampled', 'greedy', 'area'),
    smallest=0.05,
    arms=tuple(Arm(f'grpo on {tokens}', 'grpo', training=_LONGER | {
        'algorithm.mask_observations': tokens == 'policy'})
               for tokens in ('policy', 'all')),
    pairs=(('grpo on policy', 'grpo on all'),))

LAMBDAS = (0.0, 0.2, 0.4)
MODELS = {'tiny_base': '', 'tiny_raw': TINY_RAW}


def rewarded(model: str, lambda_f: float) -> str:
  """The name of the arm whose reward counts the format with lambda_f.

  With 0 on tiny_base it is the default's: exact match alone.
  """
  same = (model, lambda_f) == ('tiny_base', 0.0)
  return 'grpo' if same else f'{model} lambda {lambda_f:g}'


def _format_arm(model: str, path: str, lambda_f: float) -> Arm:
  return Arm(rewarded(model, lambda_f), 'grpo', policy={'model.path': path},
             training={'reward': 'searchrl.agent.rewards:format_em',
                       'reward_options': dict(lambda_f=lambda_f)})


FORMAT = Experiment(
    hypothesis='On tiny_raw, which breaks the format more often than not, a '
    'reward for the format raises valid turns faster, but lowers greedy exact '
    'match of 2 and 3 hops: to answer at once is the cheapest valid response. '
    'On tiny_base, which keeps the format, it changes less than .05.',
    measures=('greedy', 'searches', 'valid turns'),
    smallest=0.05,
    arms=(GRPO, *(_format_arm(model, path, lambda_f)
                  for model, path in MODELS.items() for lambda_f in LAMBDAS
                  if rewarded(model, lambda_f) != GRPO.name)),
    pairs=tuple((rewarded(model, lambda_f), rewarded(model, 0.0))
                for model in MODELS for lambda_f in LAMBDAS[1:]))


# Self-play -------------------------------------------------------------------

_QUIET = {f'{role}.train.{name}': value for role in ('proposer', 'solver')
          for name, value in (('loggers', ()), ('progress', False),
                              ('keep_checkpoints', 1))} | {
    'solver.evaluate.worlds.kinds': ()}  # judged afterwards, like all
_LAST_SOLVER = 'iteration_2/solver'
OF_PROPOSERS = ('difficulty', 'truth', 'needed', 'truth of questions',
                'questions of 2 hops', "proposer's rollouts")
_OF_SELFPLAY = ('greedy', 'greedy, 1 hop', 'greedy, 2 hops', 'greedy, 3 hops',
                'sampled', *OF_PROPOSERS)


def _played(name: str, rival: str = '', seeds: tuple[int, ...] = ()) -> Arm:
  recipe, size = ('drzero_rivals', rival) if rival else ('drzero', 'laptop')
  return Arm(name, recipe, size, solver=_LAST_SOLVER, seeds=seeds)


DRZERO = _played('drzero')
SELFPLAY = Experiment(
    hypothesis='Written when two runs of another seed had been seen. Difficulty '
    'and truth are of the proposer of the first iteration, tried by the first '
    'solver on documents that it was not trained on; those of the untrained '
    'proposer are as before training. Trained, it writes questions that are '
    'harder by .05 or more, and its truth does not fall by .1: what is false is '
    'never answered, so that truth rises. It asks for two hops less often, '
    'because the first solver answers one hop as seldom as the reward likes. '
    'Its solver is above that of the untrained proposer in sampled exact match, '
    'and within .05 of the one that is trained on questions of the world itself, '
    'by as many rollouts. Shuffled answers teach nothing: that solver is below '
    'the others by .2 or more. (Two seeds of that control are set aside, as '
    '"shuffled answers, some right": three of 275 answers were still right, and '
    'in one seed 14 rewards of 1,728 trajectories taught .81 of two hops. No '
    'question keeps its answer since.)',
    measures=_OF_SELFPLAY,
    smallest=0.05,
    arms=(BASE, DRZERO, _played('untrained proposer', 'untrained'),
          _played('shuffled answers', 'shuffled'),
          Arm("the world's questions", 'grpo', training={
              'data.per_hop': (500, 500), 'data.mix': (2, 1),
              'data.common': 0.2})),
    pairs=(('drzero', 'untrained proposer'), ('drzero', 'shuffled answers'),
           ('drzero', "the world's questions"), ('drzero', 'base'),
           ('shuffled answers', 'base'),
           ('untrained proposer', "the world's questions")))

_THREE = (0, 1, 2)
_RIVALS = {name: _played(name, name, _THREE) for name in (
    'nested_grpo', 'nested_grpo_equal', 'r_zero', 'sqlm')}
RIVALS = Experiment(
    hypothesis='At equal steps HRPO spends .3 of the rollouts of nested GRPO, and '
    'its solver is not below by .05. At equal rollouts it is not below, either. '
    'R-Zero and SQLM, without a reward for the form and on fewer documents, are '
    'below in truth, and not separably in exact match.',
    measures=_OF_SELFPLAY,
    smallest=0.05,
    arms=(DRZERO, *_RIVALS.values()),
    pairs=tuple(('drzero', name) for name in _RIVALS))
_ABLATED = {name: _played(name, name, _THREE) for name in (
    'parabola', 'without_format', 'without_document', 'longer', 'ratio_1111',
    'ratio_2111')}
ABLATIONS = Experiment(
    hypothesis='Without the document the proposer asks about names that it makes '
    'up: truth falls by .3 or more, and with it exact match by .1 or more. Without '
    'the format, with the parabola, with twice the steps and with other shares of '
    'hops exact match differs by less than .05.',
    measures=_OF_SELFPLAY,
    smallest=0.05,
    arms=(DRZERO, *_ABLATED.values()),
    pairs=tuple((name, 'drzero') for name in _ABLATED))


def distinct(experiments: Sequence[Experiment]) -> Iterator[Arm]:
  """Each arm once.

  Raises:
    ValueError: two different arms have one name.
  """
  seen = {}
  for arm in (arm for experiment in experiments for arm in experiment.arms):
    if arm.name not in seen:
      seen[arm.name] = arm
      yield arm
    elif seen[arm.name] != arm:
      raise ValueError('arms must have names of their own, but two that '
                       f'differ are called {arm.name!r}. Rename one.')
