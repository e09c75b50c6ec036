# Copyright The searchrl Authors
# SPDX-License-Identifier: Apache-2.0
"""Shows the formulas, lists and sources of docstrings as they are written.

Formulas and lists are indented by two columns. Markdown wants four.
"""

import re
import textwrap

import griffe


class Plain(griffe.Extension):
  """Makes code of indented paragraphs, and paragraphs of sources."""

  def on_object(self, *, obj, **kwargs):
    """Changes the docstring of an object that has been read."""
    del kwargs
    if obj.docstring:
      obj.docstring.value = '\n\n'.join(
          textwrap.indent(part, '    ') if part.startswith(' ')
          else re.sub(r'^Source: ', '*Source.* ', part)
          for part in obj.docstring.value.split('\n\n'))
