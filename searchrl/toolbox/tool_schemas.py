# Copyright The searchrl Authors
# SPDX-License-Identifier: Apache-2.0
"""JSON schemas of the arguments of tools: validators, and faults of schemas."""

from collections.abc import Iterator, Mapping
import re
from typing import Any

import jsonschema
from jsonschema import validators
import jsonschema_specifications
import referencing
from referencing import exceptions
from referencing import jsonschema as dialects


def validator(schema: Mapping[str, Any]) -> Any:
  """Returns the validator of a schema, which follows no address outside it."""
  return _kind(schema)(schema, registry=referencing.Registry())


def fault(schema: Any) -> str:
  """Returns why a schema cannot be used, in words after "but", or ''."""
  kind = _kind(schema)
  try:
    kind.check_schema(schema)
  except jsonschema.SchemaError as error:
    return f'are not: {error.message}'
  return next(_faults_inside(schema, kind), '')


def _kind(schema: Any) -> Any:
  """Returns the class of validators of the draft that a schema declares."""
  default = validators.Draft202012Validator
  if isinstance(schema, Mapping) and isinstance(schema.get('$schema'), str):
    return validators.validator_for(schema, default=default)
  return default


def _faults_inside(schema: Any, kind: Any) -> Iterator[str]:
  """Yields the references and patterns that a validator could not follow."""
  dialect = dialects.specification_with(kind.ID_OF(kind.META_SCHEMA))
  root = dialect.create_resource(schema)
  resolver = jsonschema_specifications.REGISTRY.resolver_with_root(root)
  pending: list[tuple[Any, Any]] = [(root, resolver)]
  seen = set()
  while pending:
    resource, resolver = pending.pop()
    part = resource.contents
    if not isinstance(part, Mapping) or id(part) in seen:
      continue
    seen.add(id(part))
    for reference in (part.get('$ref'), part.get('$dynamicRef')):
      if isinstance(reference, str):
        try:
          target = resolver.lookup(reference)
        except (exceptions.Unresolvable, ValueError, TypeError):
          yield f'refer to {reference!r}, which is not in them'
          continue
        pending.append((dialect.create_resource(target.contents),
                        target.resolver))
    for pattern in (part.get('pattern'), *part.get('patternProperties', ())):
      try:
        re.compile(pattern or '')
      except re.error:
        yield f'have the pattern {pattern!r}, which Python cannot compile'
    for inner in map(dialect.create_resource, dialect.subresources_of(part)):
      pending.append((inner, resolver.in_subresource(inner)))
