# Copyright The searchrl Authors
# SPDX-License-Identifier: Apache-2.0
"""A seed in, a fictional world out: facts, passages that state them, questions."""
