# Copyright The searchrl Authors
# SPDX-License-Identifier: Apache-2.0
"""Text encoders and rerankers, as plain functions of texts."""
