package manifest

import (
	"bytes"
	"encoding/json"
	"errors"
	"io"
	"strconv"
	"strings"

	"go.yaml.in/yaml/v3"
)

// readJSON reads the documents of a file up to the first error. The YAML package is no
// help: it refuses some of JSON's escapes, and several documents without "---".
func readJSON(text []byte) ([]*yaml.Node, *Error) {
	var documents []*yaml.Node
	decoder := json.NewDecoder(bytes.NewReader(text))
	decoder.UseNumber()
	r := &jsonReader{decoder: decoder, text: text, line: 1}
	for {
		n, err := r.node()
		if errors.Is(err, io.EOF) {
			return documents, nil
		}
		if err != nil {
			return documents, r.fault(err)
		}
		documents = append(documents, n)
	}
}

type jsonReader struct {
	decoder *json.Decoder
	text    []byte
	// line is that of the byte at offset.
	line, offset int
}

// here is the line of the last token.
func (r *jsonReader) here() int {
	offset := int(r.decoder.InputOffset())
	r.line += bytes.Count(r.text[r.offset:offset], []byte("\n"))
	r.offset = offset
	return r.line
}

// node reads a value with all that is in it. It returns io.EOF only before the first token.
func (r *jsonReader) node() (*yaml.Node, error) {
	token, err := r.decoder.Token()
	if err != nil {
		return nil, err
	}
	n := &yaml.Node{Kind: yaml.ScalarNode, Line: r.here()}
	switch t := token.(type) {
	case json.Delim:
		n.Kind = yaml.SequenceNode
		if t == '{' {
			n.Kind = yaml.MappingNode
		}
		for r.decoder.More() { // names of fields and values in turn
			child, err := r.node()
			if err != nil {
				return nil, unexpectedEnd(err)
			}
			n.Content = append(n.Content, child)
		}
		_, err = r.decoder.Token() // the closing bracket
		return n, unexpectedEnd(err)
	case string:
		n.Tag, n.Style, n.Value = "!!str", yaml.DoubleQuotedStyle, t
	case json.Number:
		n.Style, n.Value = jsonNumber, t.String()
	case bool:
		n.Tag, n.Value = "!!bool", strconv.FormatBool(t)
	default:
		n.Tag, n.Value = "!!null", "null"
	}
	return n, nil
}

func unexpectedEnd(err error) error {
	if errors.Is(err, io.EOF) {
		return io.ErrUnexpectedEOF
	}
	return err
}

// fault adds the line of the value that cannot be read. The offset in the decoder's
// error counts from the value that it is in.
func (r *jsonReader) fault(err error) *Error {
	offset := len(r.text)
	if errors.Is(err, io.ErrUnexpectedEOF) {
		err = errors.New("unexpected end of file")
	} else {
		offset -= len(bytes.TrimLeft(r.text[r.decoder.InputOffset():], " \t\r\n"))
	}
	return newError(lineAt(r.text, offset), errors.New(strings.TrimPrefix(err.Error(), "json: ")))
}
