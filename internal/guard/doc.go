// Package guard tests what no package can test alone: who may import what, and whether the
// documents are true. Its programs summarize a test run (summary), keep the tables of
// docs/PERFORMANCE.md (figures), compare API changes with CHANGELOG.md (promise), and run what the
// gate leaves out (prove).
package guard
