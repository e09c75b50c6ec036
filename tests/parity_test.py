# Copyright The searchrl Authors
# SPDX-License-Identifier: Apache-2.0
"""transformers, live, against ours; needs the `parity` extra (torch)."""

import functools
import json
import shutil

import jax
import numpy as np
import pytest
from searchrl.agent import chat
from searchrl.agent import tokenizer as tokenizers
from searchrl.experiment import policy as policies
from searchrl.models import crossencoder
from searchrl.models import encoder
from searchrl.models import experts
from searchrl.models import policy_logprobs
from searchrl.models import transformer
from searchrl.models import weights
from searchrl.models.inference import engine as engines
from searchrl.models.inference import stops

torch = pytest.importorskip('torch', reason="pip install -e '.[parity]'")
transformers = pytest.importorskip('transformers')
from transformers.models.qwen3_moe import modeling_qwen3_moe
CONTINUED = 40  # tokens
SHAPE = dict(vocab_size=96, hidden_size=32, num_hidden_layers=2,
             num_attention_heads=4, num_key_value_heads=2, intermediate_size=48,
             max_position_embeddings=128, bos_token_id=None, eos_token_id=0,
             tie_word_embeddings=False)
LLAMA3 = {'rope_type': 'llama3', 'rope_theta': 500.0, 'factor': 8.0,
          'low_freq_factor': 1.0, 'high_freq_factor': 4.0,
          'original_max_position_embeddings': 32}
EXPERTS = dict(head_dim=16, num_experts=5, moe_intermediate_size=24)
FAMILIES = {
    'qwen2': ('Qwen2Config', {}),
    'qwen2 tied': ('Qwen2Config', dict(tie_word_embeddings=True)),
    'qwen2 with a window': ('Qwen2Config', dict(
        use_sliding_window=True, sliding_window=5, max_window_layers=0)),
    'qwen3': ('Qwen3Config', dict(head_dim=16)),
    'qwen3 with biases': ('Qwen3Config', dict(
        head_dim=16, attention_bias=True, tie_word_embeddings=True)),
    'qwen3 with experts': ('Qwen3MoeConfig', dict(
        EXPERTS, num_experts_per_tok=2)),
    'qwen3 with experts whose weights add up to 1': ('Qwen3MoeConfig', dict(
        EXPERTS, num_experts_per_tok=3, norm_topk_prob=True,
        tie_word_embeddings=True)),
    'qwen3 with experts and a window': ('Qwen3MoeConfig', dict(
        EXPERTS, num_experts_per_tok=2, use_sliding_window=True,
        sliding_window=5)),
    'qwen3 with experts without head_dim': ('Qwen3MoeConfig', dict(
        num_experts=5, moe_intermediate_size=24, num_experts_per_tok=2)),
    'qwen3 with many experts and biases': ('Qwen3MoeConfig', dict(
        EXPERTS, num_experts=16, num_experts_per_tok=4, norm_topk_prob=True,
        attention_bias=True, num_hidden_layers=3)),
    'llama 2': ('LlamaConfig', {}),
    'llama 3': ('LlamaConfig', dict(
        rope_parameters=LLAMA3, tie_word_embeddings=True)),
    'llama with biases': ('LlamaConfig', dict(
        attention_bias=True, mlp_bias=True, head_dim=16)),
    'mistral': ('MistralConfig', dict(sliding_window=5)),
    'mistral without a window': ('MistralConfig', dict(sliding_window=None)),
}


@pytest.fixture(scope='module')
def both(tmp_path_factory):
  """A policy that has moved away from the shipped one, exported; and theirs."""
  path = str(policies.TINY_BASE)
  shape, folder = weights.read_config(path), tmp_path_factory.mktemp('export')
  rng = np.random.default_rng(0)
  params = jax.tree.map(
      lambda x: x + 0.01 * rng.normal(size=x.shape).astype(np.float32),
      weights.load(path, shape))
  tokenizer = tokenizers.load(path)
  weights.save(folder, params, shape, tokenizer_from=path,
               eos_id=tokenizer.eos_ids[0])
  theirs = transformers.AutoModelForCausalLM.from_pretrained(folder).eval()
  return folder, shape, params, tokenizer, theirs


def prompt(tokenizer):
  return tokenizer.encode('Search, then answer: What is the river of Zeston?\n')


def test_log_probs_are_those_of_transformers(both):
  _, shape, params, tokenizer, theirs = both
  ids = np.array([prompt(tokenizer)])
  ours, _ = policy_logprobs.token_logprobs(params, ids, shape)
  with torch.no_grad():
    logits = theirs(torch.tensor(ids)).logits.log_softmax(-1).numpy()
  expected = np.take_along_axis(logits[0, :-1], ids[0, 1:, None], -1)[:, 0]
  np.testing.assert_allclose(ours[0, 1:], expected, atol=2e-4)


def test_exported_policy_continues_identically_under_greedy_decoding(both):
  _, shape, params, tokenizer, theirs = both
  ids = prompt(tokenizer)
  with torch.no_grad():
    expected = theirs.generate(
        torch.tensor([ids]), do_sample=False, max_new_tokens=CONTINUED,
        eos_token_id=None, pad_token_id=0)[0, len(ids):].tolist()
  ends = stops.compile_table((), (), shape.vocab_size, tokenizer.eos_ids)
  engine = engines.Engine(shape, slots=1, length=128, stop_table=ends)
  engine.load(params, 0.0)
  engine.append([engines.Append(0, ids, CONTINUED, (0, 0, 0, 0, 0), True)])
  stopped = []
  while not stopped:
    stopped = engine.decode()
  ours = list(stopped[0].tokens)
  assert ours == expected[:len(ours)] and (
      len(ours) == CONTINUED or ours[-1] in tokenizer.eos_ids)


def test_an_export_ends_greedy_texts_where_its_source_does(both, tmp_path):
  folder, shape, params, tokenizer, theirs = both
  ids = torch.tensor([prompt(tokenizer)])
  with torch.no_grad():
    text = theirs.generate(
        ids, do_sample=False, max_new_tokens=CONTINUED, eos_token_id=None,
        pad_token_id=0)[0].tolist()
  ends = [*tokenizer.eos_ids, text[ids.shape[1] + 5]]
  source = shutil.copytree(folder, tmp_path / 'source')
  (source / 'generation_config.json').write_text(
      json.dumps({'eos_token_id': ends}))
  weights.save(tmp_path / 'export', params, shape, tokenizer_from=source,
               eos_id=chat.ends(tokenizers.load(str(source))))
  ended = []
  for path in (source, tmp_path / 'export'):
    model = transformers.AutoModelForCausalLM.from_pretrained(path).eval()
    assert model.generation_config.eos_token_id == ends
    with torch.no_grad():
      ended.append(model.generate(
          ids, do_sample=False, max_new_tokens=CONTINUED, pad_token_id=0
      )[0].tolist())
  assert ended[0] == ended[1] and ended[0][-1] in ends
  assert ended[0] == text[:len(ended[0])] != text


def test_tokenizer_is_that_of_transformers(both):
  folder, _, _, tokenizer, _ = both
  theirs = transformers.AutoTokenizer.from_pretrained(folder)
  text = 'Search, then answer: 3 naïve rivers?\n<search> Zeston</search>'
  assert list(tokenizer.encode(text)) == theirs.encode(
      text, add_special_tokens=False)
  assert tokenizer.decode(tokenizer.encode(text)) == text


def randomised(model):
  """Far from uniform; biases and norms not trivial."""
  with torch.no_grad():
    for name, leaf in model.named_parameters():
      norm = 'norm' in name.lower() and name.endswith('weight')
      leaf.copy_((1.0 if norm else 0.0) + (0.3 if norm else 0.2)
                 * torch.randn_like(leaf))
  return model.eval()


@pytest.fixture(scope='module', params=FAMILIES)
def family(request, tmp_path_factory):
  """transformers' own folder of a tiny random model, and the model."""
  kind, changes = FAMILIES[request.param]
  torch.manual_seed(0)
  theirs = randomised(transformers.AutoModelForCausalLM.from_config(
      getattr(transformers, kind)(**SHAPE | changes)))
  folder = tmp_path_factory.mktemp('family') / 'model'
  theirs.save_pretrained(folder)
  return folder, theirs


def read(folder):
  config = weights.read_config(folder)
  return config, weights.load(folder, config)


def test_numbers_and_gradients_of_every_family(family, tmp_path):
  folder, theirs = family
  config, params = read(folder)
  ids = np.random.default_rng(0).integers(1, 96, (2, 48))
  out = theirs(torch.tensor(ids), output_hidden_states=True)
  expected = out.logits[:, :-1].log_softmax(-1).gather(
      -1, torch.tensor(ids)[:, 1:, None])[..., 0]
  theirs.zero_grad()
  expected.mean().backward()
  hidden = jax.jit(lambda params: transformer.forward(
      params, ids, config))(params)
  np.testing.assert_allclose(
      hidden, out.hidden_states[-1].detach(), atol=2e-4)
  np.testing.assert_allclose(
      transformer.logits(params, hidden), out.logits.detach(), atol=2e-4)

  @functools.partial(jax.value_and_grad, has_aux=True)
  def gradient(params):
    logprobs, _ = policy_logprobs.token_logprobs(params, ids, config)
    return logprobs[:, 1:].mean(), logprobs

  (_, logprobs), grads = jax.jit(gradient)(params)
  np.testing.assert_allclose(logprobs[:, 1:], expected.detach(), atol=2e-4)
  weights.save(tmp_path / 'grads', grads, config, tokenizer_from=folder,
               eos_id=0)
  ours = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / 'grads')
  for name, leaf in theirs.named_parameters():
    np.testing.assert_allclose(
        ours.get_parameter(name).detach(), leaf.grad, atol=2e-5, rtol=1e-3,
        err_msg=name)


@pytest.mark.parametrize('dtype', ['float32', 'bfloat16'])
@pytest.mark.parametrize('shard_bytes', [30_000, 10**9])
def test_transformers_to_ours_to_transformers_is_bitwise(
    family, tmp_path, dtype, shard_bytes):
  folder, theirs = family
  theirs = transformers.AutoModelForCausalLM.from_pretrained(
      folder, dtype=getattr(torch, dtype))
  theirs.save_pretrained(tmp_path / 'theirs')
  config, params = read(tmp_path / 'theirs')
  weights.save(tmp_path / 'ours', params, config, tokenizer_from=folder,
               eos_id=0, dtype=dtype, shard_bytes=shard_bytes)
  assert weights.read_config(tmp_path / 'ours') == config
  again, report = transformers.AutoModelForCausalLM.from_pretrained(
      tmp_path / 'ours', output_loading_info=True)
  assert again.dtype == theirs.dtype  # that of config.json
  assert not any(report[kind] for kind in report)
  for name, leaf in theirs.state_dict().items():
    assert torch.equal(again.state_dict()[name], leaf), name
  for field in ('sliding_window', 'head_dim', 'rope_parameters', 'layer_types',
                'attention_bias', 'mlp_bias', 'tie_word_embeddings'):
    assert getattr(again.config, field, None) == getattr(
        theirs.config, field, getattr(again.config, field, None)), field


@pytest.mark.parametrize(
    'family', ['qwen2 with a window', 'llama with biases'], indirect=True)
def test_greedy_continuations(family):
  """Models with a golden file are continued in weights_test instead."""
  folder, theirs = family
  config, params = read(folder)
  ids = np.random.default_rng(1).integers(1, 96, 12).tolist()
  with torch.no_grad():
    expected = theirs.generate(
        torch.tensor([ids]), do_sample=False, max_new_tokens=CONTINUED,
        eos_token_id=None, pad_token_id=0)[0, len(ids):].tolist()
  never = stops.compile_table((), ('never',), config.vocab_size)
  engine = engines.Engine(config, slots=1, length=64, stop_table=never, tile=8)
  engine.load(params, 0.0)
  engine.append([engines.Append(0, ids, CONTINUED, (0,) * 5, True)])
  stopped = []
  while not stopped:
    stopped = engine.decode()
  assert list(stopped[0].tokens) == expected


def test_the_balance_of_experts_is_the_loss_of_transformers():
  rng = np.random.default_rng(0)
  logits = rng.normal(size=(3, 20, 8)).astype(np.float32)  # 3 layers
  used = rng.random(20) < .7
  theirs = modeling_qwen3_moe.load_balancing_loss_func(
      tuple(map(torch.tensor, logits)), 8, 2, torch.tensor(used[None]))
  loads = [experts.load(experts.route(x, 2, False), used) for x in logits]
  ours = experts.balance(jax.tree.map(lambda *x: np.stack(x), *loads))
  np.testing.assert_allclose(ours, theirs, rtol=1e-5)


@pytest.mark.parametrize('kind', ['BertModel', 'BertForMaskedLM'])
def test_vectors_of_the_encoder(kind, tmp_path):
  torch.manual_seed(0)
  shape = {k: v for k, v in SHAPE.items() if not k.startswith(
      ('num_key', 'tie', 'bos', 'eos'))}
  theirs = randomised(getattr(transformers, kind)(
      transformers.BertConfig(**shape)))
  theirs.save_pretrained(tmp_path)
  config = encoder.read_config(tmp_path)
  params = encoder.load(tmp_path, config)
  ids = torch.randint(1, 96, (3, 30))
  mask = (torch.arange(30) < torch.tensor([[30], [11], [2]])).long()
  with torch.no_grad():
    hidden = getattr(theirs, 'bert', theirs)(
        ids, attention_mask=mask).last_hidden_state
  mean = hidden.masked_fill(~mask[..., None].bool(), 0).sum(1) / mask.sum(
      1)[:, None]  # as on E5's card
  ours = jax.jit(lambda params: encoder.embed(
      params, ids.numpy(), mask.numpy(), config))(params)
  np.testing.assert_allclose(
      ours, torch.nn.functional.normalize(mean, dim=1), atol=1e-5)


def test_a_saved_encoder_is_transformers_own(tmp_path):
  shape = encoder.EncoderConfig(
      vocab_size=96, hidden_size=32, num_hidden_layers=2,
      num_attention_heads=4, intermediate_size=48, max_position_embeddings=64)
  rng = np.random.default_rng(0)
  params = jax.tree.map(
      lambda x: x + 0.1 * rng.normal(size=x.shape).astype(np.float32),
      encoder.init(shape, jax.random.key(0)))
  encoder.save(tmp_path, params, shape, tokenizer_from=tmp_path)
  theirs, report = transformers.BertModel.from_pretrained(
      tmp_path, add_pooling_layer=False, output_loading_info=True)
  assert not report['missing_keys'] and not report['unexpected_keys']
  ids = torch.randint(1, 96, (3, 30))
  mask = (torch.arange(30) < torch.tensor([[30], [11], [2]])).long()
  with torch.no_grad():
    expected = theirs.eval()(ids, attention_mask=mask).last_hidden_state
  ours = jax.jit(lambda params: encoder.forward(
      params, ids.numpy(), mask.numpy(), shape))(params)
  seen = mask.numpy().astype(bool)
  np.testing.assert_allclose(np.asarray(ours)[seen], expected.numpy()[seen],
                             atol=1e-5)


def test_scores_of_the_cross_encoder(tmp_path):
  torch.manual_seed(0)
  shape = {k: v for k, v in SHAPE.items() if not k.startswith(
      ('num_key', 'tie', 'bos', 'eos'))}
  theirs = randomised(transformers.BertForSequenceClassification(
      transformers.BertConfig(**shape, num_labels=1)))
  theirs.save_pretrained(tmp_path)
  config = encoder.read_config(tmp_path)
  params = crossencoder.load(tmp_path, config)
  ids = torch.randint(1, 96, (3, 30))
  mask = (torch.arange(30) < torch.tensor([[30], [11], [2]])).long()
  segments = (torch.arange(30) >= torch.tensor([[9], [4], [1]])).long()
  with torch.no_grad():
    expected = theirs(ids, attention_mask=mask, token_type_ids=segments).logits
  ours = jax.jit(lambda params: crossencoder.score(
      params, ids.numpy(), mask.numpy(), segments.numpy(), config))(params)
  np.testing.assert_allclose(ours, expected[:, 0], atol=1e-5)
