// Package docs holds the tests that keep the documents true: links lead somewhere,
// Go snippets are parts of files that compile, shell commands run, and whatever is
// named exists.
package docs
