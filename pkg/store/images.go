package store

import (
	"context"
	"encoding/json"
	"fmt"

	"go.etcd.io/bbolt"

	"github.com/sandboxd/sandboxd/pkg/errs"
	"github.com/sandboxd/sandboxd/pkg/sandbox/record"
)

// PutImage adds an image, or moves its name:tag to it. Without replace it fails with
// errs.Denied if name:tag is an image with another digest, or one whose record cannot
// be read.
func (db *DB) PutImage(ctx context.Context, i record.Image, replace bool) error {
	b, err := json.Marshal(i)
	if err == nil {
		err = db.commit(ctx, func(tx *bbolt.Tx) error {
			if was := tx.Bucket(bucketImages).Get([]byte(i.Ref())); was != nil && !replace {
				if is, err := readImage([]byte(i.Ref()), was); err != nil {
					return refusal{record.NotReplaced(i, "in a record that cannot be read")}
				} else if is.Digest != i.Digest {
					return refusal{record.NotReplaced(i, "digest "+is.Digest)}
				}
			}
			return tx.Bucket(bucketImages).Put([]byte(i.Ref()), b)
		}, nil)
	}
	if err != nil {
		return fmt.Errorf("put image %s: %w", i.Ref(), err)
	}
	return nil
}

// GetImage returns the image that name:tag is now. A record that cannot be read is
// errs.Internal; it can be deleted, and replaced.
func (db *DB) GetImage(_ context.Context, name, tag string) (i record.Image, ok bool, err error) {
	ref := record.Image{Name: name, Tag: tag}.Ref()
	err = db.bolt.View(func(tx *bbolt.Tx) error {
		b := tx.Bucket(bucketImages).Get([]byte(ref))
		ok = b != nil
		if !ok {
			return nil
		}
		i, err = readImage([]byte(ref), b)
		return err
	})
	if err != nil {
		return record.Image{}, false, errs.Wrap(err, errs.Internal, "the record of image %s cannot be read: remove it (sandboxctl "+
			"image rm), and build or import it again", ref)
	}
	return i, ok, nil
}

// ListImages returns all images by name and tag, and the name:tag of the records that
// cannot be read: these may need any layer.
func (db *DB) ListImages(context.Context) (list []record.Image, unreadable []string, err error) {
	err = db.bolt.View(func(tx *bbolt.Tx) error {
		return tx.Bucket(bucketImages).ForEach(func(k, v []byte) error {
			if i, err := readImage(k, v); err == nil {
				list = append(list, i)
			} else {
				unreadable = append(unreadable, string(k))
			}
			return nil
		})
	})
	if err != nil {
		return nil, nil, fmt.Errorf("list images: %w", err)
	}
	return list, unreadable, nil
}

func readImage(ref, b []byte) (i record.Image, err error) {
	if err = json.Unmarshal(b, &i); err == nil && i.Ref() != string(ref) {
		err = fmt.Errorf("it contains the record of %q", i.Ref())
	}
	return i, err
}

// lookAtImages reports the records that cannot be read.
func (db *DB) lookAtImages(tx *bbolt.Tx) error {
	return tx.Bucket(bucketImages).ForEach(func(k, v []byte) error {
		if _, err := readImage(k, v); err != nil {
			db.log.Error("the record of an image cannot be read; no layer is removed until that image is removed or replaced",
				"image", string(k), "err", err)
		}
		return nil
	})
}

// hasImage refuses an image if its name:tag is gone or is another image by now: its
// layers may be gone.
func hasImage(tx *bbolt.Tx, i record.Image) error {
	if b := tx.Bucket(bucketImages).Get([]byte(i.Ref())); b != nil {
		if is, err := readImage([]byte(i.Ref()), b); err == nil && is.Digest == i.Digest {
			return nil
		}
	}
	return refusal{errs.New(errs.Unavailable, "image %s was just removed or replaced; try again", i.Ref())}
}

// DeleteImage removes the record of name:tag, which may be unreadable. It is no error
// if there is none.
func (db *DB) DeleteImage(ctx context.Context, name, tag string) error {
	ref := record.Image{Name: name, Tag: tag}.Ref()
	if err := db.commit(ctx, func(tx *bbolt.Tx) error {
		return tx.Bucket(bucketImages).Delete([]byte(ref))
	}, nil); err != nil {
		return fmt.Errorf("delete image %s: %w", ref, err)
	}
	return nil
}
