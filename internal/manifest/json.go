package manifest

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"strings"
)

// readJSON reads the documents of a file, as far as it is JSON. YAML is not quite a
// superset of it, and would not accept several documents in a row.
func readJSON(text []byte) ([]*value, *fault) {
	var documents []*value
	decoder := json.NewDecoder(bytes.NewReader(text))
	decoder.UseNumber()
	r := &jsonReader{decoder, text}
	for {
		v, err := r.value()
		if errors.Is(err, io.EOF) {
			return documents, nil
		}
		if err != nil {
			return documents, r.fault(err)
		}
		documents = append(documents, v)
	}
}

type jsonReader struct {
	decoder *json.Decoder
	text    []byte
}

// line is that of the token that was read last.
func (r *jsonReader) line() int { return lineAt(r.text, int(r.decoder.InputOffset())) }

// value returns io.EOF only before the first token.
func (r *jsonReader) value() (*value, error) {
	token, err := r.decoder.Token()
	if err != nil {
		return nil, err
	}
	switch token {
	case json.Delim('{'):
		return r.children(&value{kind: mapping, line: r.line()})
	case json.Delim('['):
		return r.children(&value{kind: list, line: r.line()})
	default:
		text, err := json.Marshal(token)
		return &value{kind: scalar, line: r.line(), text: text}, err
	}
}

func (r *jsonReader) children(v *value) (*value, error) {
	for r.decoder.More() {
		if v.kind == mapping {
			token, err := r.decoder.Token()
			if err != nil {
				return nil, unexpectedEnd(err)
			}
			v.names = append(v.names, name{fmt.Sprint(token), r.line()})
		}
		child, err := r.value()
		if err != nil {
			return nil, unexpectedEnd(err)
		}
		v.children = append(v.children, child)
	}
	_, err := r.decoder.Token() // the closing bracket
	return v, unexpectedEnd(err)
}

func unexpectedEnd(err error) error {
	if errors.Is(err, io.EOF) {
		return io.ErrUnexpectedEOF
	}
	return err
}

// fault finds the line of the value that cannot be read. The decoder's own offset
// is that of a value within another one.
func (r *jsonReader) fault(err error) *fault {
	offset := len(r.text)
	if errors.Is(err, io.ErrUnexpectedEOF) {
		err = errors.New("unexpected end of file")
	} else {
		offset -= len(bytes.TrimLeft(r.text[r.decoder.InputOffset():], " \t\r\n"))
	}
	return &fault{lineAt(r.text, offset), errors.New(strings.TrimPrefix(err.Error(), "json: "))}
}
