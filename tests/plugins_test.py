# Copyright The searchrl Authors
# SPDX-License-Identifier: Apache-2.0
"""plugins: 'module:function' finds any function, or says what is wrong."""

import pytest

from searchrl.agent import plugins
from searchrl.agent import rewards


def resolve(name):
  return plugins.resolve(name, field='reward', ours='x:y and x:z')


def test_a_function_is_found_by_its_name(tmp_path, monkeypatch):
  assert resolve('searchrl.agent.rewards:em') is rewards.em
  (tmp_path / 'my_rewards.py').write_text('def always(trajectory): return 1.0')
  monkeypatch.syspath_prepend(tmp_path)
  assert resolve('my_rewards:always')(None) == 1.0


@pytest.mark.parametrize('name', [
    '', 'em', ':em', 'searchrl.agent.rewards', 'searchrl.agent.rewards:',
    'searchrl.agent.rewards:exactmatch', 'searchrl.agent.reward:em'])
def test_what_cannot_be_found_is_named_with_examples(name):
  with pytest.raises(ValueError, match="reward must be 'module:function', but "
                                       f'{name!r} cannot be found: .* x:y'):
    resolve(name)
