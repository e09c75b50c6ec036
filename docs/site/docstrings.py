# Copyright The searchrl Authors
# SPDX-License-Identifier: Apache-2.0
"""Shows the formulas, lists and sources of docstrings as they are written.

Formulas and lists are indented by two columns. Markdown wants four. A field
without a docstring has its comment instead.
"""

import re
import textwrap

import griffe


class Plain(griffe.Extension):
  """Makes code of indented paragraphs, and paragraphs of sources."""

  def on_object(self, *, obj, **kwargs):
    """Changes the docstring of an object that has been read."""
    del kwargs
    if obj.is_attribute and not obj.docstring and obj.lineno:
      obj.docstring = griffe.Docstring(_comment(obj), parent=obj)
    if obj.docstring:
      obj.docstring.value = '\n\n'.join(
          textwrap.indent(part, '    ') if part.startswith(' ')
          else re.sub(r'^Source: ', '*Source.* ', part)
          for part in obj.docstring.value.split('\n\n'))


def _comment(obj):
  """Returns the comment behind a field, or the lines of comment above it."""
  lines = obj.lines_collection[obj.filepath]
  behind = re.search(r'  # (.+)$', lines[obj.endlineno - 1])
  if behind:
    return behind[1]
  above = []
  for line in reversed(lines[:obj.lineno - 1]):
    if not line.lstrip().startswith('# '):
      break
    above.insert(0, line.strip().removeprefix('# '))
  return ' '.join(above)
