# Copyright The searchrl Authors
# SPDX-License-Identifier: Apache-2.0
"""'module:function' in, the function out: how a config names behaviour."""

from collections.abc import Callable
import importlib
from typing import Any


def resolve(name: str, *, field: str, ours: str) -> Callable[..., Any]:
  """The function that a config names.

  Args:
    name: 'module:function'.
    field: the option that holds it, for the message.
    ours: examples that exist, for the message.

  Raises:
    ValueError: there is no such module or function.
  """
  module, _, function = name.partition(':')
  try:
    return getattr(importlib.import_module(module), function)
  except (ImportError, AttributeError, ValueError) as error:
    raise ValueError(
        f"{field} must be 'module:function', but {name!r} cannot be found: "
        f'{error}. Ours are {ours}.') from error
