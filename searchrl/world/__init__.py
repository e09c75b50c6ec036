# Copyright The searchrl Authors
# SPDX-License-Identifier: Apache-2.0
"""Generated fictional worlds: facts, passages that state them, questions."""
