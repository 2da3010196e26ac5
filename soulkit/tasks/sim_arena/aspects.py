"""What a judge of style looks at: the benchmark's names of features, by task.

They guide the comparison with a person; the features that a row's person showed are the row's own.
"""

from __future__ import annotations

MATH_WRITING = (
    "Frequency of Grammatical Errors", "Sentence Complexity", "Spelling Consistency",
    "Punctuation and Capitalization Usage", "Range and Formality of Vocabulary",
    "Repetitive or Filler Words", "Ambiguous or Clear Language", "Reading Level",
    "Use of Mathematical Symbols and Notation", "Sentence Fragmentation", "Use of Conjunctions",
    "Use of Slang, Contractions, or Emojis",
)  # fmt: skip
MATH_INTERACTION = (
    "Message Length", "Answer Thoroughness", "Clarification Seeking", "Feedback Style",
    "Topic Coherence", "Contextual Reference", "Implementation of Feedback", "Confidence Level",
    "Emotional Expression", "Real-Time Thought Expression", "Error Handling",
    "Structured Problem-Solving", "Problem-Solving Engagement", "Seeking Guidance",
    "Incremental Learning", "Depth of Inquiry", "Meta-Cognitive Awareness",
)  # fmt: skip
DOC_WRITING = (
    "Frequency of Grammatical Errors", "Sentence Complexity", "Spelling Consistency",
    "Punctuation Usage", "Capitalization Patterns", "Range of Words", "Repetitive or Filler Words",
    "Level of Formality", "Use of Slang, Contractions, or Emojis", "Ambiguous or Clear Language",
    "Fragmentation of Sentences", "Complexity of Requests", "Clause Variety",
    "Politeness Frequency", "Sentence Initiation Variety",
)  # fmt: skip
DOC_INTERACTION = (
    "Message Length", "Answer Thoroughness", "Information and Clarification Seeking",
    "Acknowledgment and Feedback Style", "Context and Coherence",
    "Adaptability and Feedback Implementation", "Emotional Expression",
    "Persistence and Redundancy in Feedback", "Personalization and Creative Engagement",
    "Iterative and Incremental Refinement", "Specificity and Goal Orientation in Feedback",
    "Balance of Instruction and Inquiry", "Structured and Methodical Feedback",
)  # fmt: skip
