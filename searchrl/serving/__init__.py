# Copyright The searchrl Authors
# SPDX-License-Identifier: Apache-2.0
"""Servers: of an engine at /retrieve, of a policy behind OpenAI's API."""
