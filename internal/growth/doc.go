// Package growth measures how the cost of each parse, plan, answer and dump grows with its input: twice
// the input may cost a little more than twice the time, and not four times. It has only tests.
package growth
