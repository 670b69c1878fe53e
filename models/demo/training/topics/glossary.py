"""What the demo model knows about Ostinato, about serving language models, and about Python.

Each glossary entry is `names | definition | more`: the names that a question can use, the answer in
one paragraph, and the answer to "tell me more".
"""

from typing import Final, NamedTuple

__all__ = ["COMMANDS", "GLOSSARY", "HOW_IT_WORKS", "PYTHON", "Entry"]


class Entry(NamedTuple):
    """One thing that can be explained."""

    names: tuple[str, ...]
    definition: str
    more: str


_GLOSSARY = """
an ostinato; ostinato in music; a musical ostinato | An ostinato is a short musical phrase that is repeated again and again under everything that is played over it. A famous example is the snare drum in Ravel's Bolero. | The word is Italian and means obstinate. The repeated phrase can be a rhythm, a bass line or a melody. Pachelbel's Canon and many pop songs are built on one. The Ostinato engine took its name from it, because it captures a compiled graph once and then replays it at every step.
Ostinato; the Ostinato engine; this engine; the Ostinato project | Ostinato is an engine that runs and serves large language models. It traces a model once into a compiled graph, and then serving is a loop that fills buffers and replays that graph. | It keeps the attention cache in blocks, shares common prefixes between requests, and splits long prompts into chunks. It speaks the OpenAI API, is configured through Hydra, and runs on a GPU or on an ordinary CPU.
paged attention; PagedAttention | Paged attention keeps the keys and values of every request in small blocks of fixed size, much like the pages of memory in an operating system. A block table tells the attention kernel where the blocks of each request are. | Because the blocks need not lie side by side, almost no memory is lost to gaps. Two requests with the same beginning can also share blocks. So more requests fit on the same device, and the throughput goes up.
a KV cache; the KV cache; KV caching | The KV cache holds the keys and values of all tokens that the model has already read, so that each new token only has to be computed once. | Without it, the model would have to read the whole text again for every token. The cache grows with every token, so it often needs more memory than anything else but the weights. That is why engines manage it in blocks.
a block table; the block table | A block table is a list, kept for each request, of the cache blocks that hold its tokens. It works like a page table in an operating system. | Position zero of the list is the block with the first tokens, position one is the next block, and so on. The attention kernel looks there to find each key and value.
a block pool; the block pool | The block pool owns all cache blocks. It hands out free blocks, counts who uses each one, and takes them back when a request ends. | A block that is no longer used stays in the pool with its contents until someone needs the space. If a new prompt begins in the same way, the block can be used again. The oldest unused block is given away first.
prefix caching; prefix cache; automatic prefix caching | Prefix caching keeps the cache blocks of earlier prompts. When a new prompt begins with the same tokens, those blocks are reused and need not be computed again. | Each full block gets a hash of its tokens and of everything before it. A new prompt looks up its hashes one after another and stops at the first miss. It helps most with long system prompts and with chats of many turns.
chunked prefill; prefill chunking | Chunked prefill cuts a long prompt into pieces, and runs one piece in each step next to the decode work of other requests. So a long prompt does not make everyone else wait. | Each step has a budget of tokens. Decoding requests take one token each, and what is left over goes to prompt pieces. A smaller budget gives smoother streams, a larger one gives faster prompts.
continuous batching; in-flight batching | Continuous batching lets requests join and leave the batch at every step, instead of waiting until the whole batch is done. | A short answer leaves as soon as it is finished, and its place is given to the next request at once. The device stays busy and nobody waits for the slowest request.
a CUDA graph; CUDA graphs; CUDA graph capture | A CUDA graph is a recording of GPU work that can be replayed with a single launch. It removes the cost of launching every kernel one by one. | Ostinato captures one graph for each bucket of batch sizes when it starts. During serving it fills the static buffers and replays the graph that fits. This matters most in decode, where each step is very short.
a bucket; buckets; bucketing | A bucket is one of a few fixed batch sizes. A batch is padded up to the next bucket, so that a graph captured in advance can be replayed for it. | With buckets of 1, 2, 4 and 8, for example, a batch of three requests runs in the bucket of four. Few buckets start faster, many buckets waste less padding.
prefill; the prefill phase | Prefill is the first phase of a request: the model reads the whole prompt in parallel and fills the KV cache with it. | Prefill is limited by compute, because many tokens go through the model at once. It ends with the first token of the answer, so it decides the time to first token.
decode; decoding; the decode phase | Decode is the phase in which the model writes its answer, one token per step for each request. | Each step has to read all weights for only one token per request, so decode is limited by memory bandwidth. Batching many requests together makes it efficient.
a token; tokens | A token is a small piece of text, such as a word, part of a word or a punctuation mark. Language models read and write tokens. | In English a token is about four characters on average. My own vocabulary has only a few thousand tokens, while large models know more than a hundred thousand.
a tokenizer; tokenization; the tokenizer | A tokenizer cuts text into tokens and gives each token a number, and it turns the numbers back into text. | Mine is a byte-level BPE tokenizer. It can write down any text, even emoji, because it can always fall back to single bytes.
a batch; batching; batch size | A batch is a group of requests that go through the model together in one step. A larger batch uses the device better, but each step takes a little longer. | In decode, one read of the weights serves every request in the batch. That is why throughput grows with the batch size, until the compute or the memory is used up.
a scheduler; the scheduler; scheduling | The scheduler decides at each step which requests run and how many tokens each of them gets. | It keeps running requests going first, then admits waiting ones while there are free blocks and tokens left in the budget. When memory runs out, it preempts a request and brings it back later.
preemption; preempting a request | Preemption means that a running request is paused and gives back its cache blocks, because there is not enough memory for all. It continues later. | There are two ways to bring it back. Recompute reads its tokens once more, and swap copies its blocks to host memory and back. Either way the request gives the same answer, only later.
TTFT; time to first token | TTFT means time to first token. It is the time from the arrival of a request until the first token of its answer. | It is made of the time in the queue and the time for prefill. Prefix caching makes it shorter, and a long queue makes it longer.
ITL; inter-token latency | ITL means inter-token latency. It is the time between one token of an answer and the next. | People notice ITL as the speed at which text appears. Large prompts in the same batch can disturb it, and chunked prefill keeps it smooth.
TPOT; time per output token | TPOT means time per output token. It is the average time for each token of an answer after the first one. | If an answer has 100 tokens after the first one and takes 2 seconds for them, its TPOT is 20 milliseconds.
throughput | Throughput is the amount of work done per second, for example tokens per second or requests per second. | A larger batch usually gives more throughput and a higher latency. Tuning an engine means choosing a good point between the two.
latency | Latency is the time that one request has to wait, for its first token or for its whole answer. | For language models it is often split into TTFT for the first token and ITL for the others.
a language model; a large language model; an LLM; LLMs | A large language model is a neural network that has learned from text to predict the next token. By doing so again and again, it writes answers. | The large ones have billions of parameters. I have only a few million, so please do not expect too much of me.
inference; model inference | Inference means running a trained model to get answers from it. Training is what happens before that. | For a language model, inference has two phases: prefill reads the prompt and decode writes the answer.
training; model training | Training means showing a model many examples and changing its weights a little each time, so that its predictions get better. | I was trained on small made-up conversations in well under an hour on one CPU core.
weights; model weights; parameters; a parameter | The weights, or parameters, of a model are the numbers that it has learned in training. They are loaded once and then used at every step. | Each weight takes two bytes in bfloat16. A model with one billion parameters therefore needs about two gigabytes for its weights.
attention; self-attention | Attention lets each token look at the tokens before it and take in what is useful. It is the heart of a transformer. | Every token makes a query, a key and a value. The query is compared with all earlier keys, and the values are mixed by how well they match.
a transformer; transformers; the transformer architecture | A transformer is a neural network made of layers of attention and small feed-forward networks. Almost all language models today are transformers. | Each layer first mixes information between tokens with attention, and then works on each token alone. I am a transformer too, a very small one.
the context window; context length; a context window | The context window is the largest number of tokens that a model can take into account, counting both the prompt and the answer. | Mine has 2048 tokens. When a chat gets longer than the window, the oldest turns have to be left out.
a prompt | A prompt is the text that you give to a language model. The model reads it and then writes what should come next. | In a chat the prompt holds all turns so far, put together by a chat template.
a system prompt; the system prompt; a system message | A system prompt is a message at the beginning of a chat that tells the model how to behave. | Since many chats begin with the same system prompt, prefix caching can store its blocks once for all of them.
a chat template; chat templates | A chat template turns a list of messages into the one text that the model was trained to read, with marks for who is speaking. | Mine is called ChatML. Each message begins with im_start and the role, and finishes with im_end.
temperature; sampling temperature | Temperature decides how freely the next token is chosen. At zero the model always takes the most likely token, and at higher values it becomes more surprising. | The scores of the tokens are divided by the temperature before they become probabilities. Small models like me are best at a low temperature.
top-p; top_p; nucleus sampling | With top-p sampling, only the most likely tokens are kept, just enough of them that their probabilities add up to p. | It is also called nucleus sampling. A top-p of 1 keeps every token, and a top-p of 0.9 drops the unlikely tail.
top-k; top_k | With top-k sampling, only the k most likely tokens are kept, and one of them is chosen. | A top-k of 1 is the same as greedy decoding.
greedy decoding; greedy sampling | Greedy decoding always takes the most likely next token. It is what you get with a temperature of zero. | It gives the same answer every time, which is good for tests. It can sound dull or repeat itself.
sampling | Sampling means choosing the next token at random, with the probabilities that the model gives. | Temperature, top-p and top-k change these probabilities. A seed makes the choice repeatable.
beam search | Beam search keeps several possible answers at once, extends each of them, and keeps the best ones at every step. | In Ostinato the beams share the cache blocks of their common beginning, and copy a block only when they begin to differ.
logits | Logits are the raw scores that a model gives to every token of its vocabulary before they are turned into probabilities. | The softmax function turns logits into probabilities that add up to one.
logprobs; log probabilities | Logprobs are the logarithms of token probabilities. They tell how sure the model was of each token. | A logprob of zero means complete certainty, and more negative values mean less likely tokens.
a seed; the seed | A seed is a number that starts a random generator. With the same seed, the same choices are made again. | In Ostinato each request can bring its own seed, so its answer does not depend on what else is in the batch.
streaming; token streaming | Streaming sends each piece of an answer as soon as it is written, instead of waiting for the whole answer. | Ostinato streams over HTTP with server-sent events. Each event carries a few characters, and the last one says done.
a stop sequence; stop sequences; stop strings | A stop sequence is a text that ends the answer as soon as the model writes it. | You can give several of them in a request. The stop sequence itself is not part of the answer.
the EOS token; an EOS token; end of sequence | The EOS token is the special token with which a model says that its answer is finished. Mine is called im_end. | When the engine sees it, the request is done and its blocks go back to the pool.
speculative decoding; speculation | In speculative decoding a cheap guesser proposes several tokens, and the large model checks all of them in one step. | Right guesses are kept and the first wrong one is thrown away, so the answer stays the same and only comes sooner. The guesser can be a small model, or simply a search for repeated phrases.
a draft model; draft models | A draft model is a small model that guesses the next tokens for a larger one in speculative decoding. | It must use the same tokenizer as the large model. The more often its guesses are right, the faster the answer.
quantization; quantisation; a quantized model | Quantization stores the weights of a model with fewer bits, for example 8 or 4 instead of 16. The model becomes smaller and often faster. | A little accuracy can be lost. Well-known formats are FP8, INT8, GPTQ and AWQ.
LoRA; a LoRA adapter; LoRA adapters | LoRA is a way to adapt a model by adding small low-rank matrices to its weights, instead of changing all of them. | Since the adapters are small, an engine can keep many of them and use several in the same batch.
structured output; guided decoding; constrained decoding | Guided decoding lets the model choose only tokens that fit a given form, such as a JSON schema, a regular expression or a list of choices. | At each step a mask blocks all tokens that would break the form. So the answer can always be parsed.
tensor parallelism | Tensor parallelism splits each layer of a model over several devices, which compute their parts at the same time. | After each part the devices exchange their results. It helps when one device is too small or too slow for the model.
pipeline parallelism | Pipeline parallelism gives each device some of the layers of a model, so that the data flows from one device to the next. | It needs less communication than tensor parallelism, but several batches must be under way to keep every device busy.
a GPU; GPUs | A GPU is a processor that does very many simple calculations at the same time. Language models run fast on it. | Its memory is fast too, which is what decode needs most. I am so small that a CPU is enough for me.
a CPU; CPUs | A CPU is the main processor of a computer. Ostinato can run models on it, using the same graph as on a GPU. | I was trained on a CPU and you may well be running me on one now.
an embedding; embeddings | An embedding is a list of numbers that stands for the meaning of a token or a text. Similar texts have similar embeddings. | They are used to search, to compare and to sort texts. The server offers them at the embeddings endpoint.
a neural network; neural networks | A neural network is a program made of layers of simple units, whose weights are learned from examples. | Language models are neural networks with many layers. I have only a handful.
torch.compile; the compiled graph; a compiled graph | torch.compile turns a PyTorch model into one optimized graph, so that Python is no longer in the way while the model runs. | Ostinato traces the model into one graph with a custom operation for paged attention. Once the server is ready, nothing is compiled any more.
Hydra; the configuration | Hydra is a library for configuration. With it, every setting of Ostinato can be written in a file or changed on the command line. | A setting is changed by writing its name, an equals sign and a value. Every value is checked before the engine starts.
Litestar | Litestar is the Python web framework that Ostinato uses for its HTTP server. | It receives the requests and streams the answers, while the engine runs in a process of its own.
FlashInfer | FlashInfer is a library of fast attention kernels for GPUs. Ostinato can use it for paged attention. | On machines without it, Ostinato uses Triton on a GPU or its own kernel on a CPU.
Triton | Triton is a language for writing GPU kernels in Python. Ostinato has a Triton kernel for paged attention. | It is one of the attention backends. The others are FlashInfer and a backend for the CPU.
PyTorch | PyTorch is a Python library for tensors and neural networks. Ostinato is built on it. | It provides the tensors, the compiler and the CUDA graphs that the engine uses.
the OpenAI API; OpenAI compatibility; the API | The OpenAI API is a common way to talk to language models over HTTP. Ostinato speaks it, so existing clients work without changes. | There are endpoints for chat completions, completions, embeddings and models. Point your client at the address of the server and choose a model name.
server-sent events; SSE | Server-sent events are a simple way for a server to push small messages to a client over one HTTP connection. | Each message is a line that begins with the word data. Ostinato uses them to stream tokens.
metrics; Prometheus metrics; the metrics | Metrics are the numbers that an engine reports about itself, such as requests, TTFT, ITL, throughput and cache use. | Ostinato shows them at the metrics endpoint in the format of Prometheus, so that you can draw graphs and set alarms.
warm-up; warmup; warming up | Warm-up is the work that an engine does before it is ready, such as loading weights, compiling and capturing graphs. | In Ostinato nothing compiles after the ready signal, so the first request is as fast as the next ones.
determinism; deterministic mode | Determinism means that the same request always gives the same tokens. In Ostinato it is a mode that holds whatever else is in the batch. | It is not free, because sums must always be added in the same order. It is useful for tests and for science.
swapping; KV swapping; swap space | Swapping moves cache blocks from the device to host memory when the device is full, and moves them back later. | It is one of two ways to preempt a request. The other way is to compute the blocks again.
the memory plan; a memory plan | The memory plan is a table that shows where every byte on the device will go: weights, graphs, buffers and cache. | You can print it with run plan before anything is loaded. So there is no surprise when the engine starts.
a benchmark; benchmarks; benchmarking | A benchmark measures how fast something is under known conditions. Ostinato has one that you start with run bench. | It reports throughput, TTFT and ITL, together with the settings and the machine. A number without its conditions says little.
grouped-query attention; GQA | In grouped-query attention several query heads share one head of keys and values, so the KV cache becomes smaller. | I use it too: my query heads share their keys and values in pairs.
rotary embeddings; RoPE; rotary position embeddings | Rotary embeddings tell the model where a token stands by rotating its query and key by an angle that depends on the position. | The attention score then depends only on the distance between two tokens. Most models of today use it.
RMSNorm | RMSNorm is a simple way to keep the numbers in a neural network at a steady size. It divides a vector by its root mean square. | It is used before each part of a layer in Llama and Qwen models, and in me.
FP8 | FP8 is a number format with only 8 bits. It makes models and caches half as large as 16-bit formats do. | New GPUs can multiply FP8 numbers very fast. Ostinato can use it for weights and for the KV cache.
bfloat16; bf16 | Bfloat16 is a number format with 16 bits. It has the range of 32-bit numbers but fewer digits. | My own weights are stored in bfloat16.
a hallucination; hallucination; hallucinations | A hallucination is an answer of a language model that sounds right but is made up. | It happens when a model has to speak about something that it has never learned. I try to say that I do not know.
a request; a serving request | A request is one question to the engine: a prompt with settings such as the temperature and the largest number of tokens. | It waits in the queue, is prefilled, decodes until it is finished, and then gives its blocks back. Every request ends in exactly one answer.
a queue; the request queue; the waiting queue | The queue holds the requests that have arrived but do not run yet. | The scheduler takes requests out of it when there is room. A long queue makes the time to first token longer.
copy-on-write | Copy-on-write means that two requests share a block until one of them wants to change it. Only then is the block copied. | It makes several answers to the same prompt cheap, because they share the prompt.
a kernel; GPU kernels; a GPU kernel | A kernel is a small program that runs on the GPU, for example one that computes attention. | A model step launches many kernels. CUDA graphs make these launches cheap.
a llama; Llama; Llama models | Llama is a family of open language models. Many other models use the same architecture, and Ostinato can run them. | It uses RMSNorm, rotary embeddings and a gated feed-forward network.
Qwen; Qwen models; Qwen3 | Qwen is a family of open language models. My own architecture is that of Qwen3, only much smaller. | Compared with Llama it also normalizes queries and keys in attention.
"""

GLOSSARY: Final[list[Entry]] = [
    Entry(tuple(n.strip() for n in names.split(";")), definition.strip(), more.strip())
    for names, definition, more in (line.split("|") for line in _GLOSSARY.strip().splitlines())
]

# How the commands are used: forms of a question, and the answer.
COMMANDS: Final[list[tuple[list[str], str]]] = [
    (
        ["How do I start the server?", "How do I start Ostinato?", "How do I serve a model?", "How can I run the server?",
         "What does run serve do?", "What is run serve?", "How do I launch the API server?", "Start the server", "How do I use Ostinato?"],
        "Type `run serve` to start the server. It loads the model, captures the graphs and then answers on the OpenAI API.",
    ),
    (
        ["How do I chat with a model?", "How do I start a chat?", "What does run chat do?", "What is run chat?",
         "How can I chat in the terminal?", "How do I talk to a model?"],
        "Type `run chat` to talk with a model in the terminal. You may well be using it right now.",
    ),
    (
        ["How do I generate text?", "What does run generate do?", "What is run generate?", "How do I run a single prompt?",
         "How can I generate text from a prompt?", "How do I complete a prompt?"],
        "Type `run generate` with a prompt. It runs the model once, prints the text and exits, without any server.",
    ),
    (
        ["How do I run a benchmark?", "What does run bench do?", "What is run bench?", "How do I measure the speed?",
         "How can I benchmark Ostinato?", "How fast is Ostinato?", "How fast are you?"],
        "Type `run bench` to measure it on your machine. It reports throughput, time to first token and inter-token latency, together with the conditions.",
    ),
    (
        ["How much memory do I need?", "What does run plan do?", "What is run plan?", "How do I see the memory plan?",
         "Will the model fit?", "How do I check the memory?"],
        "Type `run plan` to see the memory plan. It shows where every byte will go, before anything is loaded.",
    ),
    (
        ["How do I tune Ostinato?", "What does run tune do?", "What is run tune?", "How can I make it faster?",
         "How do I find good settings?", "How do I tune for latency?"],
        "Type `run tune` with your goals, for example `run tune slo.ttft_ms=300 slo.itl_ms=25`. It searches for settings that meet them and prints the command to serve with.",
    ),
    (
        ["What does run compile do?", "What is run compile?", "How do I compile a model in advance?", "How do I make a compiled bundle?"],
        "Type `run compile` to build the compiled bundle in advance. Another machine can load it and start in seconds.",
    ),
    (
        ["What commands are there?", "Which commands does Ostinato have?", "List the commands", "What can I type?",
         "What are the commands of Ostinato?", "Show me the commands", "Which commands can I use?"],
        "The main commands are:\n- `run serve` starts the server\n- `run chat` opens a chat in the terminal\n- `run generate` completes one prompt\n"
        "- `run bench` measures the speed\n- `run tune` searches for good settings\n- `run plan` prints the memory plan",
    ),
    (
        ["How do I change a setting?", "How do I configure Ostinato?", "How do I set an option?", "How can I change the configuration?"],
        "Write the name of the setting and its value after the command, like `run serve server.port=9000`. Every value is checked before the engine starts.",
    ),
    (
        ["How do I stop the server?", "How do I shut down Ostinato?", "How can I stop the engine?", "How do I quit the server?"],
        "Press Ctrl-C once. The server stops taking new requests, finishes the running ones and then exits.",
    ),
    (
        ["How do I use the API?", "How do I call the server?", "How do I use the OpenAI client?", "How do I connect a client?",
         "How can I send a request to the server?"],
        "Start the server with `run serve`, then point any OpenAI client at its address and send a chat completion. The server answers in the same format as the OpenAI API.",
    ),
    (
        ["Does Ostinato need a GPU?", "Can Ostinato run on a CPU?", "Does it run on a laptop?", "Do I need a GPU?", "Can I use it without a GPU?"],
        "No GPU is needed. Ostinato treats the CPU as a first-class device, so a laptop can serve small models. A GPU is much faster for large ones.",
    ),
    (
        ["Which models does Ostinato support?", "What models can it run?", "Can it run other models?", "Which models can I use?", "How do I use a bigger model?"],
        "Ostinato runs GPT-2, Llama, Mistral, Falcon, GPT-NeoX and Qwen models, and other causal language models in Hugging Face format. I am only the tiny one that comes with it.",
    ),
    (
        ["Why is it called Ostinato?", "Where does the name Ostinato come from?", "What does the name Ostinato mean?", "Why the name Ostinato?"],
        "An ostinato is a musical phrase that is repeated under everything else. The engine captures a compiled graph once and replays it at every step, just like such a phrase.",
    ),
]  # fmt: skip

# Longer explanations: several sentences, so that a stream can be seen to stream.
HOW_IT_WORKS: Final[list[tuple[list[str], str]]] = [
    (
        ["How does Ostinato work?", "Explain how Ostinato works.", "How does the engine work?", "Describe the engine in detail.",
         "Give me an overview of Ostinato.", "Tell me how Ostinato works in detail"],
        "Ostinato works in three parts.\n\nFirst, the model is traced into one compiled graph. Its attention is a custom operation over a paged KV cache.\n\n"
        "Second, when the engine starts, it captures that graph for a few batch sizes, which are called buckets. After this nothing is compiled any more.\n\n"
        "Third, serving is a simple loop. The scheduler picks the tokens for the next step, the engine fills its buffers, replays the graph, samples new tokens and streams them to the clients.",
    ),
    (
        ["What happens when a request arrives?", "Describe the life of a request.", "How is a request processed?", "Walk me through a request.",
         "What happens to my prompt?", "Explain the path of a request step by step."],
        "A request goes through these steps:\n1. The server checks it and turns the text into tokens.\n2. It waits in the queue until the scheduler has room.\n"
        "3. The block pool looks for cached blocks with the same beginning.\n4. Prefill reads the rest of the prompt, in chunks if it is long.\n"
        "5. Decode writes one token per step, and each token is streamed to you.\n6. When the answer is finished, its blocks go back to the pool.",
    ),
    (
        ["What is the difference between prefill and decode?", "Compare prefill and decode.", "Prefill versus decode?", "How do prefill and decode differ?",
         "prefill vs decode"],
        "Prefill reads the whole prompt at once and is limited by compute. Decode writes one token at a time and is limited by memory bandwidth. "
        "Prefill decides the time to first token, and decode decides the inter-token latency. A good scheduler mixes both in one batch, so that neither has to wait for the other.",
    ),
    (
        ["What is the difference between TTFT and ITL?", "Compare TTFT and ITL.", "TTFT vs ITL", "How do TTFT and ITL differ?"],
        "TTFT is the time until the first token arrives, and ITL is the time between the tokens after it. TTFT is how long you wait, and ITL is how fast the text then appears.",
    ),
    (
        ["What is the difference between latency and throughput?", "Compare latency and throughput.", "latency vs throughput", "How do latency and throughput differ?"],
        "Latency is how long one request has to wait, and throughput is how much work is done per second for everyone. A larger batch usually gives more throughput and a higher latency.",
    ),
    (
        ["What makes Ostinato special?", "Why should I use Ostinato?", "What is special about Ostinato?", "What are the advantages of Ostinato?", "What is Ostinato good at?", "What can Ostinato do?"],
        "These are the things that Ostinato promises:\n- Nothing compiles once the server is ready.\n- It starts in seconds.\n- The memory plan is known before anything is loaded.\n"
        "- Settings can be tuned by naming a goal.\n- Answers can be made deterministic.\n- The CPU is a first-class device.",
    ),
    (
        ["Why is memory important for serving?", "Why does the KV cache need so much memory?", "How is memory used in serving?"],
        "Memory holds two large things: the weights of the model and the KV cache. The weights have a fixed size, but the cache grows with every token of every request. "
        "So the free memory decides how many requests can run together. Paged attention wastes very little of it, and prefix caching stores a common beginning only once.",
    ),
    (
        ["How can I make TTFT shorter?", "How do I reduce TTFT?", "How do I lower the time to first token?", "How do I get the first token sooner?"],
        "There are several ways. Keep prefix caching on, so that common beginnings are not computed again. Give the prefill a larger token budget. "
        "Limit the number of waiting requests. And if nothing helps, use a smaller model or a faster device.",
    ),
    (
        ["How can I get more throughput?", "How do I increase the throughput?", "How can I serve more requests per second?"],
        "Let more requests run together, because one read of the weights then serves all of them. Give the KV cache as much memory as you can. "
        "Quantization and speculative decoding help too. Measure each change with `run bench`.",
    ),
]  # fmt: skip

_PYTHON = """
len | returns the number of items in a container
abs | returns the absolute value of a number
sum | adds up the items of an iterable and returns the total
min | returns the smallest item
max | returns the largest item
sorted | returns a new list with the items in ascending order
reversed | returns an iterator over the items in reverse order
print | writes values to the screen, separated by spaces
range | produces a sequence of whole numbers from a start up to, but not including, a stop
enumerate | pairs each item of an iterable with its index
zip | joins several iterables and yields tuples with one item of each
map | applies a function to every item of an iterable
filter | keeps the items of an iterable for which a function returns true
any | returns True if at least one item is true
all | returns True if every item is true
int | turns a number or a string into a whole number
float | turns a number or a string into a floating-point number
str | turns any object into a string
list | makes a list, from the items of an iterable if one is given
dict | makes a dictionary, which maps keys to values
set | makes a set, which holds each item only once
tuple | makes a tuple, which is a sequence that cannot be changed
type | returns the type of an object
isinstance | tells whether an object is an instance of a class
open | opens a file and returns a file object
input | reads a line that the user types and returns it as a string
round | rounds a number to a given number of digits
pow | raises a number to a power
divmod | returns the quotient and the remainder of a division
chr | returns the character for a Unicode code point
ord | returns the Unicode code point of a character
hex | turns a whole number into a hexadecimal string
bin | turns a whole number into a binary string
id | returns a number that identifies an object
hash | returns the hash value of an object
help | shows the documentation of an object
dir | lists the names of the attributes of an object
repr | returns a string that represents an object
next | returns the next item of an iterator
iter | returns an iterator over an object
getattr | returns a named attribute of an object
callable | tells whether an object can be called like a function
bool | turns a value into True or False
append | adds an item to the end of a list
extend | adds all items of an iterable to the end of a list
pop | removes an item and returns it
sort | sorts a list in place
split | cuts a string into a list of words
join | puts strings together with a separator between them
strip | removes spaces from both ends of a string
upper | returns a copy of a string in upper case
lower | returns a copy of a string in lower case
replace | returns a copy of a string in which one part is replaced by another
import | loads a module so that you can use it
def | defines a function
class | defines a new type of object
return | ends a function and gives back a value
yield | gives back one value from a generator and pauses it
lambda | makes a small function without a name
for | repeats a block of code for every item of an iterable
while | repeats a block of code as long as a condition is true
if | runs a block of code only when a condition is true
try | runs code and lets you handle the errors that it raises
with | runs a block of code inside a context manager, which cleans up afterwards
break | leaves a loop at once
continue | skips to the next round of a loop
pass | does nothing
"""

PYTHON: Final[dict[str, str]] = dict(
    [p.strip() for p in line.split("|", 1)] for line in _PYTHON.strip().splitlines()
)
